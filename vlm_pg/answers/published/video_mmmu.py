"""Video-MMMU and MMVU, and MMMU's parser (``eval/eval_utils.py``)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from vlm_pg.answers.published.rule import Rule, accepted, chosen, ranked, short, texts_of, video_r1_rule
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_TRIMMED = (",", ".", "!", "?", ";", ":", "'")
_MANY_WORDS = 5  # an option's own text is looked for in outputs of more words
_INDICATORS = (
    *("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ", "are ", "in total ", "total "),
    *("identify ", "recognize ", "calculated as ", "counted as ", "measured as ", "observed as ", "concluded as "),
    *("found to be ", "equals ", "determined to be ", "number of ", "value is ", "adds up to ", "have ", "has "),
)
_TRIVIAL = (":", ",", ".", "!", "?", ";", "'")
# The published patterns, made so that a long run of digits is read once: a number starts where its digits do.
_GROUPED = re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b")
_SCIENTIFIC = re.compile(r"(?:-|(?<!\d))\d++(?:\.\d++)?[eE][+-]?\d+")
_SIMPLE = re.compile(r"-?(?:(?<!\d)\d++\.\d++|\.\d++|(?<!\d)\d++\b)(?![eE][+-]?\d)(?![,\d])")


def trimmed(output: str) -> str:
    """The output between blanks, without the punctuation that the parsers cut off at both ends."""
    for mark in _TRIMMED:
        output = output.strip(mark)
    return f" {output} "


def letters_in(text: str, forms: Sequence[str], letters: Sequence[str]) -> list[str]:
    """The letters that stand in ``text`` in any of ``forms`` ("({})"), form by form."""
    return [letter for form in forms for letter in letters if form.format(letter) in text]


def last_placed(letters: Sequence[str], text: str, form: str) -> str:
    """The letter that stands last in that form; the first, if several do not stand in it at all."""
    return max(letters, key=lambda letter: text.rfind(form.format(letter)))


def options_in(text: str, texts: Mapping[str, str]) -> list[str]:
    """The letters of the options whose text stands in an output of more than 5 words, in any case."""
    if len(text.split()) <= _MANY_WORDS:
        return []
    lowered = text.lower()
    return [letter for letter, option in texts.items() if option.lower() in lowered]


def last_option_text(text: str, candidates: Sequence[str], texts: Mapping[str, str]) -> str:
    """The candidate whose text stands last."""
    lowered = text.lower()
    return max(candidates, key=lambda letter: lowered.rfind(texts[letter].lower()))


def open_answers(output: str) -> set[str | float]:
    """All that MMMU's parser takes for the answer to an open question: texts in lower case, and numbers rounded to 2
    places: from each sentence what follows the last of its indicators ("is ", "so ", "equals "), and the numbers in it;
    the whole output if no sentence has one.
    """
    keys = _key_parts(output)
    numbers = [one for key in keys for pattern in (_GROUPED, _SCIENTIFIC, _SIMPLE) for one in pattern.findall(key)]
    return {value for part in (*keys, *numbers) for value in normalized(part)}


def normalized(text: str) -> list[str | float]:
    """A number rounded to 2 places, or the text in lower case; one character gets a blank before or behind it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lowered = text.lower()
        return [f" {lowered}", f"{lowered} "] if len(lowered) == 1 else [lowered]


def open_is_right(gold: str, answers: set[str | float]) -> bool:
    """Whether one of the texts contains the gold answer's text, or one of the numbers is its number."""
    golds = normalized(gold)
    texts = [one for one in golds if isinstance(one, str)]
    return any(
        any(text in answer for text in texts) if isinstance(answer, str) else answer in golds for answer in answers
    )


def _key_parts(output: str) -> list[str]:
    whole = output.strip().strip(".").lower()
    # The published split at ". " before a capital letter never happens, the text being in lower case by then.
    lines = whole.split("\n")
    keys = []
    for index, line in enumerate(lines):
        indicators = (*_INDICATORS, "=") if index == len(lines) - 1 else _INDICATORS
        tails = [line.rpartition(one)[2].strip() for one in indicators if one in line]
        # An empty tail is taken for none so far; it is chosen where a text came before it.
        shortest = ""
        for tail in tails:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in _TRIVIAL:
            keys.append(shortest)
    return keys or [whole]


_LEFT_OUT = Reading(None, 0.0, "the rule takes an empty output for a failed request and leaves it out", counts=False)
_NO_ANSWER = ("", "API Error")


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    if output in _NO_ANSWER:
        return _LEFT_OUT
    return chosen(sample, _letter(sample, output)) if _is_choice(sample) else _open(sample, output)


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    if _is_choice(sample):
        return ranked(sample, output, cut_off)
    return _LEFT_OUT if output in _NO_ANSWER else _open(sample, output)


def _is_choice(sample: Sample) -> bool:
    named = sample.details.get("question_type")
    return sample.answer_kind == "multiple_choice" if named is None else named == "multiple-choice"


def _letter(sample: Sample, output: str) -> str:
    """ "A." and "A:", else "(A)", else "A ", else an option's text; of several the last of the first form found."""
    texts, text = texts_of(sample), trimmed(output)
    letters = list(texts)
    for forms, placed in ((("{}.", "{}:"), ""), (("({})",), "({})"), (("{} ",), " {} ")):
        found = letters_in(text, forms, letters)
        if found:
            # Letters with a colon are placed by a point where any letter has one.
            form = placed or ("{}." if letters_in(text, ("{}.",), letters) else "{}:")
            return last_placed(found, text, form)
    found = options_in(text, texts)
    return last_option_text(text, found, texts) if found else ""


def _open(sample: Sample, output: str) -> Reading:
    return Reading(short(output), float(open_is_right(sample.answer, open_answers(output))))


_SOURCE = "lmms_eval/tasks/videommmu/utils.py"
_LETTER = re.compile(r"\b([A-E])\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d+\.?\d*")
_COST = re.compile(r"O\s*+\(", re.IGNORECASE)
_RAISED = str.maketrans({sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_TOLERANCE = 0.01


def _lmms_mmvu(sample: Sample, output: str, cut_off: bool) -> Reading:
    named = sample.details.get("question_type")
    if named == "multiple-choice" or (named is None and sample.answer_kind == "multiple_choice"):
        texts = texts_of(sample)
        return accepted(sample, [letter for letter in texts if _is_choice_mmvu(letter, texts[letter], output.strip())])
    right = _is_open(sample.answer, output)
    return Reading(short(output), float(right), "" if right else "no rule applies; the judge is left out")


def _is_choice_mmvu(letter: str, text: str, output: str) -> bool:
    """Whether the rule takes ``output`` for an option: the letter stands alone in it, in any case, or its text stands
    in it, or the letter is part of it and so is a word of the text.
    """
    found = _LETTER.search(output)
    if (found and found[1].upper() == letter) or re.search(rf"\b{letter}\b", output, re.IGNORECASE):
        return True
    lowered, text = output.lower(), text.strip().lower()
    if text in lowered:
        return True
    words = [word.strip(string.punctuation) for word in text.split()]
    return letter in output.upper() and any(word in lowered for word in words if len(word) > 2)


def _is_open(gold: str, output: str) -> bool:
    """Whether any of six comparisons with the gold answer holds: equal; one part of the other; first numbers within
    0.01; the gold answer's words of more than 2 letters all in the output, where it has 2 to 5; equal costs "O(...)".
    """
    gold_text, text = (" ".join(one.lower().translate(_RAISED).split()) for one in (gold, output))
    if gold_text in text or text in gold_text:
        return True
    numbers = [_NUMBER.search(one) for one in (gold_text, text)]
    if numbers[0] and numbers[1] and abs(float(numbers[0][0]) - float(numbers[1][0])) < _TOLERANCE:
        return True
    gold_words, words = ([word.strip(string.punctuation) for word in one.split()] for one in (gold_text, text))
    gold_words = [word for word in gold_words if word]
    if 2 <= len(gold_words) <= 5 and set(words) >= {word for word in gold_words if len(word) > 2}:
        return True
    cost = _cost(gold_text)
    return cost != "" and cost == _cost(text)


def _cost(text: str) -> str:
    """The first "O(...)" with something in its brackets; "" without one."""
    for opening in _COST.finditer(text):
        end = text.find(")", opening.end())
        if end == -1:
            return ""
        if end > opening.end():
            return text[opening.start() : end + 1]
    return ""


RULES = (
    Rule(
        "video_mmmu/official",
        _official,
        "the authors' rule",
        f"EvolvingLMMs-Lab/videommmu, {_SOURCE}; lmms-eval's _task_utils/mmmu_mcq_utils.py has kept its parser",
        "'A.' goes before '(A)'. An open answer is right if it contains the gold text or states its number after "
        "rounding to 2 places, so '0.286 or 0.3' is right. Empty outputs leave the denominator.",
    ),
    Rule(
        "video_mmmu/lmms",
        _lmms,
        "lmms-eval's rule",
        f"EvolvingLMMs-Lab/lmms-eval, {_SOURCE} and _task_utils/mcq_extract.py",
        "Letters are ranked by form, so that with 10 options 'I choose option B.' is I. Empty outputs are wrong "
        "answers to choices, and leave the denominator of open questions.",
    ),
    video_r1_rule("video_mmmu", odd="'(B)' and 'B.' are wrong, and so is every answer in words."),
    Rule(
        "mmvu/lmms",
        _lmms_mmvu,
        "lmms-eval's rule without its judge, which it asks about open questions that the rule calls wrong",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mmvu/utils.py, evaluate_with_rule_based",
        "Unsound: any lone gold letter in any case makes a choice right; of open answers '' is right, 'mV' for 'µV' "
        "and '48 g/mol' for '84 g/mol' too. The authors' own scoring, by gpt-4o alone, is not offered.",
    ),
    video_r1_rule("mmvu", whose="Video-R1's rule, for multiple choice alone, which it reports as MMVU (mc)"),
)
