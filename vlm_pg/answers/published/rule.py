"""A published rule, and the parts that rules share: options as published, letters by form and order, tags, numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_pg.answers.numbers import WORD_VALUES
from vlm_pg.answers.options import split_options
from vlm_pg.answers.verdict import Reader, Reading
from vlm_pg.types import Sample

MAX_TEXT = 200  # longer texts are no answers that people could compare


@dataclass(frozen=True)
class Rule:
    """A reader that does what published code does.

    ``name``: "set/whose". ``source``: repository and file. ``odd``: what is odd about it, and which part of it is not
    offered.
    """

    name: str
    read: Reader
    whose: str
    source: str
    odd: str

    @property
    def line(self) -> str:
        """All that on one line."""
        return f"{self.name}: {self.whose} ({self.source}). {self.odd}"


def letters_of(sample: Sample) -> list[str]:
    """The letters of a question's options, in order."""
    return [letter for letter, _ in split_options(sample.options)]


def texts_of(sample: Sample) -> dict[str, str]:
    """The texts of a question's options by letter, as published: without the letters that records put before them."""
    return dict(split_options(sample.options))


def chosen(sample: Sample, letter: str, note: str = "") -> Reading:
    """The reading of an output that chooses one option ("" if the rule finds none, which it counts as wrong)."""
    if sample.answer not in letters_of(sample):
        return unusable(_no_letter(sample))
    return Reading(letter or None, float(bool(letter) and letter == sample.answer), note or _unread(letter))


def accepted(sample: Sample, letters: Sequence[str]) -> Reading:
    """The reading by a rule that only says which gold answers it would have taken the output for."""
    if sample.answer not in letters_of(sample):
        return unusable(_no_letter(sample))
    note = "" if len(letters) == 1 else f"the rule takes it for {', '.join(letters)}" if letters else _unread("")
    return Reading(letters[0] if len(letters) == 1 else None, float(sample.answer in letters), note)


def unusable(why: str) -> Reading:
    """The reading where the question itself has no value."""
    return Reading(None, None, why)


def drawn(rule: str, sample: Sample, output: str) -> Reading:
    """The reading where published code chooses an option by a global random state: here the same whenever the rule, the
    question and the output are the same, and each option as often as the others.
    """
    letters = letters_of(sample)
    if not letters:
        return unusable(_no_letter(sample))
    key = "\0".join((rule, sample.sample_id, output)).encode("utf-8", "surrogatepass")
    index = int.from_bytes(hashlib.sha256(key).digest()[:8]) % len(letters)
    return chosen(sample, letters[index], "drawn: nothing was read")


def short(text: str) -> str | None:
    """``text`` as an answer for people, None where it is none or too long for one."""
    text = " ".join(text.split())
    return text if 0 < len(text) <= MAX_TEXT else None


def _no_letter(sample: Sample) -> str:
    return f"gold answer {sample.answer[:80]!r} is none of the letters of the {len(sample.options)} options"


def _unread(letter: str) -> str:
    return "" if letter else "the rule reads no answer"


_LEAD_INS = ("The best answer is", "The correct answer is", "The answer is", "The answer")
# As the published list has them: two commas are missing in it, so that four of its entries are two long texts, which no
# output contains.
VIDEO_MME_PREFIXES = (*_LEAD_INS, "The best option isThe correct option is", "Best answer:Best option:")
LONGVIDEOBENCH_PREFIXES = (*_LEAD_INS, "The best option is", "The correct option is", "Best answer:", "Best option:")


def first_letter(output: str, prefixes: Sequence[str], allowed: str) -> str:
    """The first of the letters ``allowed`` anywhere in the output without these texts; "" without any.

    first_letter("Based on the video, the answer is A", VIDEO_MME_PREFIXES, "ABCD") == "B"
    """
    for prefix in prefixes:
        output = output.replace(prefix, "")
    found = re.search(f"[{allowed}]", output)
    return found[0] if found else ""


def first_of_four(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The first of A to D; an output without any is left out of the denominator."""
    letter = first_letter(output, VIDEO_MME_PREFIXES, "ABCD")
    if not letter:
        return Reading(None, 0.0, "the rule reads no answer and leaves the output out", counts=False)
    return chosen(sample, letter)


def first_of_five_or_drawn(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The first of A to E; of an output without any, an option is drawn."""
    letter = first_letter(output, LONGVIDEOBENCH_PREFIXES, "ABCDE")
    return chosen(sample, letter) if letter else drawn("longvideobench/lmms", sample, output)


_TRIMMED = (",", ".", "!", "?", ";", ":", "'", '"')
_STEMS = (
    "answer is",
    "correct answer is",
    "best answer is",
    "correct option is",
    "best option is",
    "choice is",
    "correct choice is",
)
# After the first occurrence of each of these every letter counts, however far behind it stands.
_PHRASES = (
    *_STEMS,
    *(f"the {stem}" for stem in _STEMS),
    *("my answer is", "my choice is", "i choose", "i select", "i pick"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_START, _END, _PHRASE = 10, 9, 7
# "(A)", "A.", "A:", "A)", "A ": form, and its rank.
_FORMS = (("({})", 6), ("{}.", 5), ("{}:", 4), ("{})", 3), ("{} ", 2))


def ranked_letter(output: str, letters: Sequence[str]) -> str:
    """The letter in the form of highest rank; of several in that form, the last in the text. "" without any.

    Ranks: at the start, at the end, after a phrase such as "answer is", "(A)", "A.", "A:", "A)", "A ", anywhere.

    ranked_letter("(A) Vitamin C.", "ABCD") == "C"
    """
    text = output.strip()
    for mark in _TRIMMED:
        text = text.strip(mark)
    body, text = text.strip(), f" {text} "
    found = [(rank, text.rfind(form.format(one)), one) for one in letters for form, rank in _FORMS]
    found = [entry for entry in found if entry[1] != -1]
    found += _after_phrases(text, letters)
    for one in letters:
        if body.startswith(one) and not body[1:2].isalpha():
            found.append((_START, 0, one))
        if body.endswith(one) and not body[-2:-1].isalpha():
            found.append((_END, len(text) - 1, one))
    if not found:
        found = [(0, text.rfind(one), one) for one in letters if one in text]
    # Of equals the first that was found wins, as in a stable sort.
    return max(found, key=lambda entry: entry[:2])[2] if found else ""


def _after_phrases(text: str, letters: Sequence[str]) -> list[tuple[int, int, str]]:
    lowered = text.lower()
    found = []
    for phrase in _PHRASES:
        start = lowered.find(phrase)
        if start != -1:
            offsets = [(text.find(one, start + len(phrase)), one) for one in letters]
            found += [(_PHRASE, offset, one) for offset, one in offsets if offset != -1]
    return found


def ranked(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The letter by ``ranked_letter``; an output without any is wrong."""
    return chosen(sample, ranked_letter(output, letters_of(sample)))


_OPENING, _CLOSING = "<answer>", "</answer>"


def tagged(output: str) -> str | None:
    """What stands between the first "<answer>" and the next "</answer>", without blanks around; None without both."""
    start = output.find(_OPENING)
    end = -1 if start == -1 else output.find(_CLOSING, start + len(_OPENING))
    return None if end == -1 else output[start + len(_OPENING) : end].strip()


def plain_number(text: str) -> float | None:
    """The number that the whole text is, commas removed; None if it is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def video_r1(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Choices: the tagged text, or the whole output without one, equals the letter. Numbers: equal after rounding to 2
    places, and both written with a "." or "," or both without. Every answer in words is wrong, and counts.
    """
    text = (tagged(output) or output).strip()
    if sample.answer_kind == "multiple_choice":
        return chosen(sample, text if text in letters_of(sample) else "")
    gold, number = plain_number(sample.answer), plain_number(text)
    if sample.answer_kind not in ("numerical", "mathematics") or (gold is None and sample.answer_kind != "numerical"):
        return Reading(short(text), 0.0, "the rule scores every answer in words 0")
    if gold is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number")
    if number is None:
        return Reading(None, 0.0, "the whole answer is no number")
    alike = len({"." in one or "," in one for one in (sample.answer, text)}) == 1
    note = "" if alike else "only one of answer and gold answer is written with a point or comma, which the rule counts"
    return Reading(short(text), float(alike and round(gold, 2) == round(number, 2)), note)


def video_r1_rule(
    name: str, read: Reader = video_r1, whose: str = "Video-R1's rule", odd: str = "'(B)' and 'B.' are wrong."
) -> Rule:
    """Video-R1's rule of a set."""
    odd = f"Whole text in the first answer tags, or whole output: {odd}"
    return Rule(f"{name}/video_r1", read, whose, "tulerfeng/Video-R1, src/eval_bench.py", odd)


_WORDS = WORD_VALUES | {"hundred": 100, "thousand": 1000}

_FIGURES = re.compile(r"-?\d+(?:\.\d+)?")
_LETTERS = re.compile(r"[a-z]+")


def first_number(output: str) -> float | None:
    """The first figures or number words of ``output``, whichever come first; None without any.

    A run of number words goes on over "and" and over anything that is no word, and its values are added up: "one, two"
    is 3. "a" is no number word.

    first_number("Twenty-one chairs, 4 tables") -> 21.0
    """
    text = output.strip().lower()
    figures = _FIGURES.search(text)
    start: int | None = None
    values: list[int] = []
    for word in _LETTERS.finditer(text):
        value = _WORDS.get(word[0])
        if value is not None:
            start = word.start() if start is None else start
            values.append(value)
        elif start is not None and word[0] != "and":
            break
    if figures is not None and (start is None or figures.start() < start):
        return float(figures[0])
    if start is None:
        return None
    total = current = 0
    for value in values:
        if value == 1000:
            total, current = total + max(current, 1) * 1000, 0
        elif value == 100:
            current = max(current, 1) * 100
        else:
            current += value
    try:
        return float(total + current)
    except OverflowError:
        return float("inf")


_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# As torch.arange(0.5, 0.975, 0.05) has them: computed in double precision, kept in single.
_SINGLE = (0.5 + 0.05 * np.arange(10)).astype(np.float32)
_EPSILON = np.float32(1e-8)


def relative_accuracy_or_equal(predicted: float, gold: float) -> float:
    """Share of the thresholds t = .50, .55, ..., .95 with |p - g| / g <= 1 - t: VSI-Bench's code and lmms-eval.

    3 for a gold 4 earns 0.6, and 5 for 10 earns 0.1. ``gold`` is not 0.
    """
    return float(np.mean(abs(predicted - gold) / gold <= 1 - _THRESHOLDS))


def relative_accuracy_below(predicted: float, gold: float) -> float:
    """Share of the thresholds with |p - g| / |g| < 1 - t, in single precision: Video-R1.

    3 for a gold 4 earns 0.5, and 5 for 10 earns 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single_gold = np.float32(gold)
        error = np.abs(np.float32(predicted) - single_gold) / (np.abs(single_gold) + _EPSILON)
    return float(np.mean(error < np.float32(1) - _SINGLE))
