"""Multiple choice and multiple select: the letters that an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from vlm_pg.answers.clauses import affirmed, boxed_statement, clauses, without_lead_in
from vlm_pg.answers.options import (
    Choices,
    bare_text,
    choices_of,
    letters_of_text,
    plain_choices,
    same_text,
    split_options,
    stated_letters,
)
from vlm_pg.answers.plain_text import DECORATION, plain_formula, plain_short, without_marks
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import NONE_RIGHT, Sample, right_letters

__all__ = ["check_multiple_choice", "named_letters", "split_options"]

# "B.", "(B)", "b) red", "B: red", "b - red", or nothing but the letter.
_LABEL = re.compile(
    r"[(\[]?([A-Za-z])(?:(?:[.:]|、(?![A-Za-z]))[)\]]?|[)\]][.:]?|\s{0,3}[-](?=\s))(.*)|[(\[]?([A-Za-z])[)\]]?$",
    re.DOTALL,
)
_SPELLED_OUT = re.compile(r"(?<![^\W_])[(\[]?([A-Za-z])(?:[)\]][.:]?|[.:,、]|\s{0,3}[-])\s{0,3}(?=\S)")
# Not before a number: "3, 4" and "3 - 4" do not say 3.
_FIRST_CLAUSE = re.compile(
    r"(.*?\w)(?:[.!;]\s|[,，。；！\n]|\s-\s|\s(?=(?:because|since)\s))(?!\s{0,3}[-+±]?\s?[\d\\√.])(?s:(.*))"
)
# "x = 5", "∠A = 40", "area = 12"; of a chain of equations what it ends in.
_NAMED_VALUE = re.compile(
    r"(?P<name>(?:[∠△]|\\[a-z]{2,8}\s)?\s?[A-Za-z](?:[A-Za-z ]{0,30}[A-Za-z])?(?:_\{?\w{1,4}\}?)?)\s?=(?:.*=)?\s?"
    r"(?P<value>(?:(?![,;]\s|。)[^=])+)"
)
_NUMBER = re.compile(r"[$\s]{0,4}[-+]?\s?[\d.\\√]")

_PREDICATE = re.compile(r"((?:the|this|that|these|those)\s[\w ]{1,40})\s(?:is|was|are|were)\s(.*)", re.IGNORECASE)


def check_multiple_choice(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1.0 if ``answer`` names the gold option and no other, else 0.0.

    Understood: "B", "b", "B.", "(B)", "b)", "Option B", "B. red", "b - red", "\\boxed{B}", "The answer is B", "选B",
    and the text of the option, alone or after "The answer is". Options that the answer rejects are not named ("B, not
    A"), nor are those of an explanation ("B, because A shows a cat"). Two different letters are wrong, even if one of
    them is right. The gold answer may be spelled in the same ways. Options may stand in the question, a line each.
    """
    choices = choices_of(sample)
    gold = letters_in(sample.answer, choices)
    if len(gold) != 1:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not name one option")
    if sample.options and not gold <= dict(choices).keys():
        return Verdict(None, f"gold answer {shorten(sample.answer)} is not one of the {len(sample.options)} options")
    named = letters_in(answer, choices)
    if not named:
        return Verdict(0.0, "answer names no option")
    if len(named) > 1:
        return Verdict(0.0, f"answer names several options: {', '.join(sorted(named))}")
    return Verdict(1.0 if named == gold else 0.0)


def named_letters(text: str, options: Sequence[str]) -> set[str]:
    """The letters (upper case) of all options that ``text`` names, by letter or by the option's whole text.

    A single letter is a letter, also where the text of another option is that letter.
    """
    return letters_in(text, plain_choices(options))


def letters_in(text: str, choices: Choices) -> set[str]:
    """``named_letters`` with letters and texts of the options; by all of ``text``, and by its box alone."""
    boxed = boxed_statement(text)
    return _letters_in(text, choices) | (_letters_in(boxed, choices) if boxed else set())


def _letters_in(text: str, choices: Choices) -> set[str]:
    sentence = without_marks(plain_short(plain_formula(text)))
    # "The answer is red" says no more than "red".
    short = without_marks(without_lead_in(sentence)) or sentence
    letter = bare_text(short)  # "(A)." too
    is_letter = len(letter) == 1 and letter.isascii() and letter.isalpha()
    if is_letter and (not choices or letter.upper() in dict(choices)):
        return {letter.upper()}
    by_text = _by_whole_text(short, choices) or _by_whole_text(sentence, choices) or _by_predicate(sentence, choices)
    if by_text:
        return by_text
    if (equation := _NAMED_VALUE.fullmatch(short.rstrip(DECORATION + ".。"))) and _NUMBER.match(equation["value"]):
        return _by_value(equation, choices)
    label = _LABEL.match(short)
    if label is None:
        return stated_letters(_without_texts(sentence, choices), dict(choices)) or _by_first_clause(short, choices)
    letter, rest = (label[1] or label[3]).upper(), (label[2] or "").strip()
    same_as_rest = letters_of_text(rest, choices) if rest else set()
    if not rest or letter in same_as_rest:
        return {letter}
    return same_as_rest | stated_letters(_without_texts(f"({letter}). {rest}", choices), dict(choices))


def _by_whole_text(text: str, choices: Choices) -> set[str]:
    by_text = letters_of_text(text, choices)
    label, _, rest = text.partition(" ")
    if by_text or label.upper() not in dict(choices):
        return by_text
    by_rest = letters_of_text(rest, choices)
    return by_rest | {label.upper()} if by_rest else set()


def _by_value(equation: re.Match[str], choices: Choices) -> set[str]:
    """The options whose text is the value of an equation. A letter before it may be a label: both must agree."""
    named = _by_whole_text(equation["value"], choices)
    return named | ({equation["name"]} & dict(choices).keys() if named else set())


def _by_predicate(text: str, choices: Choices) -> set[str]:
    """The options whose text a short sentence says of something: "The colour is blue."."""
    predicate = _PREDICATE.fullmatch(text)
    if predicate is None or not all(clause.is_affirmed for clause in clauses(predicate[1])):
        return set()
    return _by_whole_text(predicate[2], choices)


def _by_first_clause(text: str, choices: Choices) -> set[str]:
    """The options whose text is the first clause, where no other's text follows: "Blue, because the sky is"."""
    clause = _FIRST_CLAUSE.match(text)
    if clause is None or not (named := _by_whole_text(clause[1], choices)):
        return set()
    rest = affirmed(clause[2]).casefold()
    return named | {letter for letter, option in choices if option and option.casefold().rstrip(".") in rest}


def _without_texts(text: str, choices: Choices) -> str:
    """``text`` with each letter that its option's text follows in brackets, and that text gone, since it may hold other
    letters: "D. Vitamin C, because" -> "(D), because"."""
    options = dict(choices)
    parts, end = [], 0
    for label in _SPELLED_OUT.finditer(text):
        option = options.get(label[1].upper())
        after = label.end() + len(option or "")
        if not option or text[label.end()].casefold() != option[0].casefold():
            continue
        spelled_out = same_text(text[label.end() : after], option) and not text[after : after + 1].isalnum()
        if spelled_out and label.start() >= end:
            parts += [text[end : label.start()], f"({label[1]})"]
            end = after
    return "".join(parts) + text[end:]


_LETTER = r"[(\[]?([A-Za-z])[)\]]?[.:]?"
_BETWEEN = re.compile(r"\s*(?:[,;、，]\s*(?:and\s)?|\sand\s|\s?(?:[&+和与]|以?及)\s?|\s)\s*", re.IGNORECASE)
_LINE = re.compile(r"\s*[;\n]\s*")
_ONE = re.compile(_LETTER)
_WITH_TEXT = re.compile(r"(?:[-*]\s)?[(\[]?([A-Za-z])(?:[)\]][.:]?|[.:])\s{0,3}(\S.*)")
_NONE = re.compile(r"none(?: of (?:the|these|those) (?:options|choices|above)| of them| is right| are right)?")


def check_multiple_select(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1.0 if ``answer`` names all right options and no other, else 0.0.

    Understood: letters ("A, C", "(A) and (C)", "A C", in their order "AC"), options with their letters, a line each or
    with semicolons between ("A. red; C. blue"), and "none". Anything else is wrong, since it does not
    say what is selected: "A or C", "not C".
    """
    choices = choices_of(sample)
    letters = {letter for letter, _ in choices} or set(string.ascii_uppercase)
    gold = right_letters(sample.answer)
    if not gold <= letters:
        return Verdict(None, f"gold answer {shorten(sample.answer)} is no list of its {len(letters)} options' letters")
    selected = selected_letters(answer, choices)
    if selected is None and (boxed := boxed_statement(answer)):
        selected = selected_letters(boxed, choices)
    if selected is None:
        return Verdict(0.0, f"answer is no list of options, nor '{NONE_RIGHT}'")
    if not selected <= letters:
        return Verdict(0.0, f"answer names options that are none: {', '.join(sorted(selected - letters))}")
    return Verdict(1.0 if selected == gold else 0.0)


def selected_letters(answer: str, choices: Choices) -> set[str] | None:
    """The letters that an answer lists; None where it is no list."""
    sentence = without_marks(plain_short(answer)).strip()
    text = without_marks(without_lead_in(sentence)).rstrip(DECORATION + ".。").strip("\\{} ") or sentence
    if _NONE.fullmatch(text.lower()) and not any(same_text(text, option) for _, option in choices):
        return set()
    listed = [_ONE.fullmatch(part) for part in _BETWEEN.split(text)]
    if all(listed):
        return {match[1].upper() for match in listed if match}
    if text.isalpha() and text.isupper() and list(text) == sorted(set(text)):
        return set(text)
    options = dict(choices)
    with_texts = [_WITH_TEXT.fullmatch(part) for part in _LINE.split(text)]
    if all(match and same_text(match[2], options.get(match[1].upper(), "")) for match in with_texts):
        return {match[1].upper() for match in with_texts if match}
    return None
