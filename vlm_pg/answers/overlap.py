"""Spans of time in a video, and boxes in a picture: intersection over union."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from vlm_pg.answers.clauses import affirmed, boxed_statement
from vlm_pg.answers.plain_text import WORD_LETTER, plain_short, without_layout
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import Sample

Span = tuple[float, float]

_NUMBER = r"(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
_SECONDS = rf"(?:(?:seconds|second|secs|sec|s)(?!{WORD_LETTER}|[0-9_])|秒)"
_MINUTES = rf"(?:(?:minutes|minute|mins|min|m)(?!{WORD_LETTER}|[0-9_])|分钟?|分鐘)"
_TIME = re.compile(
    # After a digit, a word or a bracket a minus stands between two times; elsewhere it is a sign.
    rf"(?P<sign>(?<![\w)\].])(?<![\w)\].] )-)?(?<!{WORD_LETTER})(?<![0-9_.])(?<![0-9]:)"
    r"(?:(?:(?P<hours>[0-9]{1,3}):)?(?P<clock_minutes>[0-9]{1,3}):(?P<clock_seconds>[0-5][0-9](?:\.[0-9]{1,9})?)"
    rf"(?!{WORD_LETTER}|[0-9_:])"
    rf"|(?P<minutes>{_NUMBER}) ?{_MINUTES}(?: ?(?:and )?(?P<and_seconds>{_NUMBER}) ?{_SECONDS})?"
    rf"|(?P<seconds>{_NUMBER})(?: ?(?P<unit>{_SECONDS})|(?!{WORD_LETTER}|[0-9_:])))",
    re.IGNORECASE,
)
_NAME = re.compile(r"\bt_?[12]\s?[=:]\s?", re.IGNORECASE)
_JOINED = re.compile(
    r"\s*(?:开始)?\s*(?:,|;|-{1,2}>?|\u2013|\u2014|\u2192|~|\\(?:to|sim|rightarrow)\b|(?:to|until|till|through|and)\b|到|至)?"
    r"(?:(?<=[,，])\s*(?:到|至))?\s*(?:第|second\b)?"
    r"\s*(?:and\s)?\s*[\"']?(?:(?:it\s)?(?:end|ends|ending|stop|stops)(?:[_ ]time)?\b|结束(?:时间)?)?[\"']?"
    r"\s*[:=]?\s*(?:at\s)?\s*",
    re.IGNORECASE,
)
# What stands between the two times of a span is short; longer text is not looked at.
_MAX_JOIN_CHARACTERS = 32


def check_time_span(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """Length of the intersection of the answered and the gold span, divided by the length of their union.

    Understood: "[12.5, 30]", "<12.5, 30>", "12.5 - 30 seconds", "from 0:12 to 1:05", "1 min 5 s to 2 min",
    "12秒到30秒"; numbers
    without a unit are seconds. An answer with no span, several different ones, or one that does not end after it starts
    is wrong; a gold answer like that is "no value".
    """
    gold = parse_spans(sample.answer)
    if len(gold) != 1 or _length(*gold) == 0.0:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not state one span of time")
    predicted = parse_spans(answer)
    if len(predicted) != 1:
        return Verdict(0.0, "answer states several different spans" if predicted else "answer states no span of time")
    if _length(*predicted) == 0.0:
        return Verdict(0.0, "answered span does not end after it starts")
    return Verdict(_overlap_of_spans(*predicted, *gold))


def parse_spans(text: str) -> set[Span]:
    """The different spans (start, end), in seconds, that ``text`` states; of several that in LaTeX's box.

    parse_spans("from 0:12 to 1:05") -> {(12.0, 65.0)}
    """
    spans = _spans_in(text)
    return spans if len(spans) == 1 or not (boxed := boxed_statement(text)) else _spans_in(boxed)


def _spans_in(text: str) -> set[Span]:
    times = _time_lists(_NAME.sub("", affirmed(without_layout(plain_short(text)))))
    return {(_seconds(pair[0], pair[1]), _seconds(pair[1])) for pair in times if len(pair) == 2}


def _time_lists(text: str) -> Iterator[list[re.Match[str]]]:
    """Times that follow each other with nothing but a comma, a dash or a word like "to" between them."""
    times: list[re.Match[str]] = []
    for match in _TIME.finditer(text):
        gap = text[times[-1].end() : match.start()] if times else ""
        if times and not (0 < len(gap) <= _MAX_JOIN_CHARACTERS and _JOINED.fullmatch(gap)):
            yield times
            times = []
        times.append(match)
    if times:
        yield times


def _seconds(time: re.Match[str], unit_from: re.Match[str] | None = None) -> float:
    """The seconds of one time. A number without a unit has that of ``unit_from``: "1 to 2 minutes"."""
    if time["clock_seconds"]:
        value = 3600.0 * float(time["hours"] or 0) + 60.0 * float(time["clock_minutes"]) + float(time["clock_seconds"])
    elif time["minutes"]:
        value = 60.0 * float(time["minutes"]) + float(time["and_seconds"] or 0.0)
    else:
        in_minutes = not time["unit"] and unit_from is not None and unit_from["minutes"]
        value = float(time["seconds"]) * (60.0 if in_minutes else 1.0)
    return math.copysign(value, -1.0) if time["sign"] else value


def _length(span: Span) -> float:
    return max(0.0, span[1] - span[0])


def _overlap_of_spans(left: Span, right: Span) -> float:
    shared = _length((max(left[0], right[0]), min(left[1], right[1])))
    return shared / (_length(left) + _length(right) - shared)


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
    return Verdict(_overlap_of_boxes(*predicted, *gold))


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


def _overlap_of_boxes(left: Box, right: Box) -> float:
    shared = _area((max(left[0], right[0]), max(left[1], right[1]), min(left[2], right[2]), min(left[3], right[3])))
    return shared / (_area(left) + _area(right) - shared)
