"""Boxes in an image: intersection over union."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlm_pg.answers.clauses import affirmed, boxed_statement
from vlm_pg.answers.plain_text import WORD_LETTER, plain_short, without_layout
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import Sample

Box = tuple[float, float, float, float]

# Not inside a word: the 2 of "bbox_2d" and the 1 of "x1" are no coordinates. Areas stay far from overflow.
_COORDINATE = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9_.])[+-]?(?:[0-9]{{1,15}}(?:\.[0-9]{{0,20}})?|\.[0-9]{{1,20}})(?!{WORD_LETTER}|[0-9_])"
)
# "x1=10, y1=20, x2=30, y2=40", in this order only.
_NAMED = re.compile(
    r",?\s{0,40}".join(
        rf"[\"']?\b{axis}_?(?:{end})[\"']?\s?[=:]\s?([-+]?[0-9.]{{1,24}})"
        for end in ("1|min", "2|max")
        for axis in "xy"
    ),
    re.IGNORECASE,
)
_WITHIN_LIST = re.compile(r"\s*[,;]?\s*")
_BETWEEN_LISTS = re.compile(r"\s*[)\]]\s*(?:,|,?\s?(?:to|and|和|到|至))?\s*(?:右下角?)?\s*[(\[]\s*")
# What stands between two coordinates of one box is short; longer text is not looked at.
_MAX_GAP_CHARACTERS = 16


def check_box(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """Area of the intersection of the answered and the gold box, divided by the area of their union.

    Understood: "[x1, y1, x2, y2]", {"bbox_2d": [x1, y1, x2, y2]} and "(x1, y1), (x2, y2)", with x1 < x2 and y1 < y2, in
    the gold box's own units. An answer with no box, several different ones, or one without area is wrong; a gold answer
    like that is "no value".
    """
    gold = parse_boxes(sample.answer)
    if len(gold) != 1 or _area(*gold) == 0.0:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one box with an area")
    predicted = parse_boxes(answer)
    if len(predicted) != 1:
        return Verdict(0.0, "answer states several different boxes" if predicted else "answer states no box")
    if _area(*predicted) == 0.0:
        return Verdict(0.0, "answered box has no area; x1 < x2 and y1 < y2 are needed")
    return Verdict(_intersection_over_union(*predicted, *gold))


def parse_boxes(text: str) -> set[Box]:
    """The different boxes that ``text`` states: lists of four numbers, or two points side by side.

    Of several that counts which is in LaTeX's box.

    parse_boxes("(1, 2), (3, 4)") -> {(1.0, 2.0, 3.0, 4.0)}
    """
    boxes = _boxes_in(text)
    return boxes if len(boxes) == 1 or not (boxed := boxed_statement(text)) else _boxes_in(boxed)


def _boxes_in(text: str) -> set[Box]:
    boxes: set[Box] = set()
    for lists in _lists_side_by_side(_NAMED.sub(r"[\1, \2, \3, \4]", affirmed(without_layout(plain_short(text))))):
        # Three points or more are no box, whichever two of them one takes.
        candidates = [lists[0] + lists[1]] if [len(numbers) for numbers in lists] == [2, 2] else lists
        for numbers in candidates:
            if len(numbers) == 4:
                x1, y1, x2, y2 = numbers
                boxes.add((x1, y1, x2, y2))
    return boxes


def _lists_side_by_side(text: str) -> Iterator[list[list[float]]]:
    """Lists of numbers; those with nothing but "), (" between them come together.

    _lists_side_by_side("(1, 2), (3, 4) or [5, 6]") yields [[1, 2], [3, 4]] and then [[5, 6]].
    """
    lists: list[list[float]] = []
    end = 0
    for match in _COORDINATE.finditer(text):
        gap = text[end : match.start()] if match.start() - end <= _MAX_GAP_CHARACTERS else "?"
        if lists and _WITHIN_LIST.fullmatch(gap):
            lists[-1].append(float(match[0]))
        elif lists and _BETWEEN_LISTS.fullmatch(gap):
            lists.append([float(match[0])])
        else:
            if lists:
                yield lists
            lists = [[float(match[0])]]
        end = match.end()
    if lists:
        yield lists


def _area(box: Box) -> float:
    x1, y1, x2, y2 = box
    return max(0.0, x2 - x1) * max(0.0, y2 - y1)


def _intersection_over_union(left: Box, right: Box) -> float:
    shared = _area((max(left[0], right[0]), max(left[1], right[1]), min(left[2], right[2]), min(left[3], right[3])))
    return shared / (_area(left) + _area(right) - shared)
