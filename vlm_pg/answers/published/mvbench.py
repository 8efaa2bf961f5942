"""MVBench. The gold answer is a letter; two options of one text are told apart, as far as a rule does so."""

from __future__ import annotations

import re
from collections.abc import Callable

from vlm_pg.answers.published.rule import Rule, accepted, chosen, texts_of, video_r1
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_MARKS = (";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!")
_GROUPED = re.compile(r"\d,\d")
_POINT = re.compile(r"\.(?!\d)")
# The published call passes re.UNICODE, which is 32, where the number of replacements is meant to stand.
_POINTS_REMOVED = 32
_LONE = re.compile(r"\b([A-E])\b", re.IGNORECASE)
_LABELLED = re.compile(r"([A-E])\.", re.IGNORECASE)


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    """``check_ans`` on the first line: the first word and "(b)", one within the other, points left out of the word."""
    return _accepting(sample, lambda letter, text: _first_word_fits(output.strip().split("\n")[0], letter))


def _kit(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The same on the whole output, in which moreover "(B) text" may stand anywhere."""
    return _accepting(
        sample, lambda letter, text: _first_word_fits(output.strip(), letter) or f"({letter}) {text}" in output
    )


def _accepting(sample: Sample, fits: Callable[[str, str], bool]) -> Reading:
    return accepted(sample, [letter for letter, text in texts_of(sample).items() if fits(letter, text)])


def _first_word_fits(output: str, letter: str) -> bool:
    word, option = output.lower().split(" ", 1)[0], f"({letter.lower()})"
    return word.replace(".", "") in option or option in word


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    texts = texts_of(sample)
    gold_text = texts.get(sample.answer)
    gold = next((letter for letter, text in texts.items() if text == gold_text), sample.answer)
    if output == "":
        return Reading(None, 0.0, "the rule leaves empty outputs out", counts=False)
    letter = _lone_letter(output)
    if gold != sample.answer:
        return Reading(letter or None, float(letter == gold), f"{gold}, of the same text, is taken for the gold answer")
    return chosen(sample, letter)


def _lone_letter(output: str) -> str:
    """A letter with a point at the start, before text on one line; else the first lone a to e in any case."""
    label = _LABELLED.match(output.strip())
    if label:
        text = output.strip()[label.end() :]
        before, _, last = text.rpartition("\n")
        if last and not before.strip():
            return label[1].upper()
    text = _without_marks(output.replace("\n", " ").replace("\t", " ").strip())
    found = _LONE.search(text.strip("'").strip('"').strip(")").strip("(").strip().lower())
    return found[1].upper() if found else ""


def _without_marks(text: str) -> str:
    """Marks beside a blank vanish, others become blanks; all vanish where a number such as 1,000 stands anywhere."""
    grouped = _GROUPED.search(text) is not None
    result = text
    for mark in _MARKS:
        beside_blank = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if beside_blank or grouped else " ")
    return _POINT.sub("", result, count=_POINTS_REMOVED)


RULES = (
    Rule(
        "mvbench/official",
        _official,
        "the authors' rule",
        "OpenGVLab/Ask-Anything, video_chat2/mvbench.ipynb, check_ans",
        "Right if the first word, without points, is part of '(b)', or '(b)' of the word: '' is right always, 'A man' "
        "is A, 'The answer is B' and '**B**' are wrong. The published code starts the answer itself with 'Best "
        "option:('.",
    ),
    Rule(
        "mvbench/kit",
        _kit,
        "VLMEvalKit's rule without its judge",
        "open-compass/VLMEvalKit, vlmeval/dataset/utils/mvbench.py, check_ans",
        "As the authors', on the whole output, and right as well where '(B) text of the option' stands in it. The "
        "judge that it may ask is not offered.",
    ),
    Rule(
        "mvbench/lmms",
        _lmms,
        "lmms-eval's rule",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mvbench/utils.py, mcq_acc",
        "The first lone letter a to e in any case: 'There is a man' is A. Empty outputs leave the denominator. Of "
        "equal options the first is the gold one.",
    ),
    Rule(
        "mvbench/video_r1",
        video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong.",
    ),
)
