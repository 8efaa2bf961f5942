"""VSI-Bench, by its authors, lmms-eval, Video-R1 and VLMEvalKit."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

from vlm_pg.answers.numbers import ONES, TENS
from vlm_pg.answers.published.rule import (
    Rule,
    chosen,
    first_number,
    letters_of,
    plain_number,
    relative_accuracy_below,
    relative_accuracy_or_equal,
    short,
    tagged,
    unusable,
    video_r1,
)
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_UNSEEN = re.compile("[\u200b\u200c\u200d\ufeff]")
_OPEN = r"<\s*answer\b[^>]*+>\s*+"
_CLOSE = re.compile(r"<\s*/\s*answer\s*>", re.IGNORECASE)
_NUMBER = r"[-+]?(?:\d*\.\d+|\d+)(?:e[-+]?\d+)?"
_TAGGED_LETTER = re.compile(_OPEN + "([A-J])", re.IGNORECASE)
_TAGGED_NUMBER = re.compile(rf"{_OPEN}({_NUMBER})(?:[^\d<][^<]*+)?<\s*/\s*answer\s*>", re.IGNORECASE)
_BARE_NUMBER = re.compile(_NUMBER, re.IGNORECASE)
_NUMBER_WORDS = [*ONES, TENS[0]]
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b", re.IGNORECASE)
_THINK_END = re.compile(r"</\s*think\s*>", re.IGNORECASE)
_THINK_START = re.compile(r"<\s*think\s*>", re.IGNORECASE)

# The last letter before a closing tag, lines of one letter, lines that begin with one, and capital letters alone.
_BEFORE_TAG = [
    re.compile(rf"(?<![A-Za-z])([A-F])\s*[)\]}}）】]?\s*</\s*{tag}\s*>", re.IGNORECASE) for tag in ("answer", "think")
]
_OPTION_LINE = re.compile(r"[*_>\-\s]*(?:option|选项)\s+[A-J]\s*[:：]", re.IGNORECASE)
_LETTER_LINE = re.compile(r"\s*[*_`>（）\[\]【】()]*\s*([A-Fa-f])\s*[*_`（）\[\]【】()]*\s*")
_LABEL = re.compile(r"([A-F])\s*[.．:：)\]】、-]\s", re.IGNORECASE)
_CAPITAL_IN_LINE = re.compile(r"(?<![A-Za-z])([A-F])\s*[*_`）\]}]*(?=$|[\s.,:;!?)\]】》」』，。；、：）])")
_CAPITAL = re.compile(r"(?<![A-Za-z])[A-F](?![A-Za-z])")
_CONCLUDED = re.compile(
    r"(?:final\s*+answer|the\s*+answer\s*+is|answer(?:\s*is)?|correct\s*+answer|最终答案|答案|结论|所以|因此|我选择?|选择?)"
    r"\s*+(?:[:：>＝=]\s*+)?(?:[(\[{（【]\s*+)?([A-F])(?!\w)",
    re.IGNORECASE,
)
_LAST_LINES, _LAST_CHARACTERS = 6, 800


def kit_letter(output: str) -> str:
    """The letter from A to F (in tags to J) that the kit takes an output for; "" for none.

    In turn: the first letter in answer tags (of whatever word); a letter before a closing tag; the last line, of six,
    that is a letter, begins with one or has one kind of capital letters alone; the letter behind the first "answer"
    and the like; the one capital letter that stands alone in the whole.
    """
    text = _UNSEEN.sub("", output.strip())
    closing = max((found.start() for found in _CLOSE.finditer(text)), default=-1)
    for mark in _TAGGED_LETTER.finditer(text):
        if mark.end() <= closing:
            return mark[1].upper()
    end = text[-_LAST_CHARACTERS:]
    for pattern in _BEFORE_TAG:
        if found := pattern.search(end):
            return found[1].upper()
    for lines in (_behind_thinking(text).splitlines(), end.splitlines()):
        if letter := _of_lines(lines[-_LAST_LINES:]):
            return letter
    if found := _CONCLUDED.search(text):
        return found[1].upper()
    rest = "\n".join(line for line in text.splitlines() if not _OPTION_LINE.match(line))
    letters = set(_CAPITAL.findall(rest))
    return letters.pop() if len(letters) == 1 else ""


def kit_number(output: str) -> float | None:
    """The number that begins what stands in the first answer tags, else the last one behind the thinking, else of all.

    Number words to "twenty" count as figures. Of an output that is a list in brackets its first member is read.
    """
    text = _UNSEEN.sub("", _first_of_list(output).strip())
    text = _NUMBER_WORD.sub(lambda word: str(_NUMBER_WORDS.index(word[0].lower())), text)
    if tagged := _TAGGED_NUMBER.search(text):
        return float(tagged[1])
    for part in (_behind_thinking(text), text):
        if numbers := _BARE_NUMBER.findall(part):
            return float(numbers[-1])
    return None


def _of_lines(lines: list[str]) -> str:
    for line in reversed([line.strip() for line in lines]):
        if not line or _OPTION_LINE.match(line):
            continue
        if found := _LETTER_LINE.fullmatch(line) or _LABEL.match(line):
            return found[1].upper()
        letters = set(_CAPITAL_IN_LINE.findall(line))
        if len(letters) == 1:
            return str(letters.pop())
    return ""


def _behind_thinking(text: str) -> str:
    """What follows the last closing tag of thinking, else the last opening one; all of it without either."""
    for tag in (_THINK_END, _THINK_START):
        if ends := [found.end() for found in tag.finditer(text)]:
            return text[ends[-1] :].strip()
    return text


def _first_of_list(output: str) -> str:
    bare = output.strip()
    if not (bare.startswith("[") and bare.endswith("]")):
        return output
    try:
        members = ast.literal_eval(output)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""  # on which the published code reads nothing
    return str(members[0]) if isinstance(members, list) and members else output


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The text before the first blank, without points at its end: a letter in any case, or a number."""
    word = output.split(" ", 1)[0].rstrip(".").strip()
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, word.upper() if word.upper() in letters_of(sample) else "")
    try:
        number = float(word)
    except ValueError:
        number = None
    return _graded(sample, number, short(word), "the first word is no number")


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Choices as the authors read them, numbers wherever they stand."""
    if sample.answer_kind == "multiple_choice":
        return _official(sample, output, cut_off)
    number = first_number(output)
    return _graded(sample, number, f"{number:.15g}" if number is not None else None)


def _kit(sample: Sample, output: str, cut_off: bool) -> Reading:
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, kit_letter(output))
    number = kit_number(output)
    return _graded(sample, number, f"{number:.15g}" if number is not None else None)


def _video_r1(sample: Sample, output: str, cut_off: bool) -> Reading:
    if sample.answer_kind == "multiple_choice":
        return video_r1(sample, output, cut_off)
    text = tagged(output) or output
    number = plain_number(text)
    return _graded(sample, number, short(text), "the whole answer is no number", relative_accuracy_below)


def _graded(
    sample: Sample,
    number: float | None,
    answer: str | None,
    unread: str = "there is no number",
    accuracy: Callable[[float, float], float] = relative_accuracy_or_equal,
) -> Reading:
    gold = plain_number(sample.answer)
    if gold is None or not math.isfinite(gold) or gold == 0.0:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number other than 0")
    return Reading(None, 0.0, unread) if number is None else Reading(answer, accuracy(number, gold))


RULES = (
    Rule(
        "vsi_bench/official",
        _official,
        "the authors' rule",
        "vision-x-nyu/thinking-in-space, lmms_eval/tasks/vsibench/utils.py",
        "Only the text before the first blank is read: '(B)', 'B)' and 'about 3' are wrong. Thresholds are met with "
        "<=, where the paper has <: 3 for 4 is 0.6, 5 for 10 is 0.1.",
    ),
    Rule(
        "vsi_bench/lmms",
        _lmms,
        "lmms-eval's rule since 0.7; before, it was the authors'",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/vsibench/utils.py",
        "Choices as by the authors' rule. Of numbers the first in figures or English words counts, wherever it stands: "
        "'from 2 to 3' is 2, 'one, two' is 3, '1,200' is 1. Thresholds are met with <=.",
    ),
    Rule(
        "vsi_bench/kit",
        _kit,
        "VLMEvalKit's rule without its judge",
        "open-compass/VLMEvalKit, vlmeval/dataset/utils/spatial_bench",
        "Choices by six steps, of which the first takes the letter that any word in answer tags begins with ('<answer>"
        "front</answer>' is F). Numbers: the first in answer tags, else the last ('3 or 4' is 4). Thresholds are met "
        "with <=. A gold answer of 0, which the kit compares by the difference, has no value here.",
    ),
    Rule(
        "vsi_bench/video_r1",
        _video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output. Thresholds are met with <, in single precision: 3 for 4 "
        "is 0.5. Its published figure is the mean of two means, of choices and of numbers.",
    ),
)
