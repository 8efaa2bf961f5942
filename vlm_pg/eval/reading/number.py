"""Numbers: what a whole output says the number is that was asked for."""

from __future__ import annotations

import re
from dataclasses import replace

from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.asked import Asked
from vlm_pg.eval.reading.fraction_words import parts_of_units
from vlm_pg.eval.reading.number_grade import grade_number, written
from vlm_pg.eval.reading.number_statement import Found, read_statement
from vlm_pg.eval.reading.number_words import digits_for_words, language_of
from vlm_pg.eval.reading.quantities import Quantity, plain_quantities, quantities_in
from vlm_pg.eval.reading.spelling import plain_numbers, plain_prose, without_abbreviations
from vlm_pg.eval.reading.statements import (
    first_correction,
    is_beside_the_point,
    is_check,
    label_and_value,
    last_correction,
    last_explicit,
    statements,
    table_cells,
)
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

_TOTAL = re.compile(
    r"\b(?:total|sum|combined|all|altogether|overall|left|remaining|result|answer|difference|"
    r"final|insgesamt|gesamt|summe|ergebnis|"
    r"somme|suma|soma|totale|restante?|итого|всего)\b|合计|总|共|结果|剩|合計|합계|총",
    re.IGNORECASE,
)
_COMPARES = re.compile(
    r"\b(?:is|are|looks?|seems?)\s(?:\w{1,12}\s)?(?:taller|higher|lower|longer|shorter|wider|larger|smaller|bigger|farther|"
    r"further|closer|nearer)\W{0,3}$",
    re.IGNORECASE,
)
_OF_THEM_ALONE = re.compile(
    r"^(\W{0,3}(?:there\s(?:are|were|is|was)|i\s(?:can\s)?(?:see|count))\s[0-9]{1,6})\sof\sthem(?=(?:\s(?:in\stotal|altogether))?\W{0,3}$)",
    re.IGNORECASE,
)
_MOST_EQUAL = 3  # a loop of one value is cut off as soon as it was seen this often


def read_number(
    sample: Sample, said: Said, settings: RewardSettings | None = None, *, ties_pass: bool = False
) -> Reading:
    """What ``said`` answers to a question for a number (numerical, regression, mean_relative_accuracy).

    The last statement of a number counts: what is in the last box or tag, else behind the last "The answer is", else in
    the last sentence that states one; a change of mind behind it is followed. Working, bounds, ranges, several values,
    and what is rejected are no answer. The number is converted to the unit that the question asks for.

    Args:
        sample: with its set's ``details``: "unit", "precision" (decimal places of the gold answer).
        said: what the output says.
        settings: tolerances of rewards' rule of equality; the default ones if None.
        ties_pass: mean relative accuracy counts errors that equal a threshold, as published code does and the paper
            does not.

    Returns:
        The number as plain digits, in the unit asked for, and its score by ``grade_number``.
    """
    asked = Asked.of(sample)
    quantity = answered_quantity(said, asked)
    return grade_number(quantity, asked, sample, settings or RewardSettings(), ties_pass=ties_pass)


def answered_quantity(said: Said, asked: Asked) -> Quantity | None:
    """The number that ``said`` answers; None if it states none, or several."""
    language = language_of(said.text)
    text = _prepared(said.text, language)
    if said.final is None:
        return _in_prose(text, asked, said.is_cut)
    finals = [_in_final(_prepared(one, language), asked) for one in (*said.beside, said.final)]
    after = _prepared(said.after, language)
    if not said.final.strip() and not said.beside and last_explicit(after):
        return _in_prose(after, asked, said.is_cut)
    answer = _only(finals, asked)
    return _after(after, answer, asked, said.is_cut)


def _prepared(text: str, language: str) -> str:
    plain = parts_of_units(without_abbreviations(plain_prose(text)))
    return plain_quantities(digits_for_words(plain_numbers(plain, language), language))


def _only(finals: list[Found], asked: Asked) -> Quantity | None:
    found = [one.quantity for one in finals]
    values = {None if one is None else written(one, asked) for one in found}
    return found[-1] if len(values) == 1 else None


def _in_final(text: str, asked: Asked) -> Found:
    """What a box, a tag or an explicit statement says: its last statement that says something."""
    for one in reversed(statements(text)):
        found = read_statement(one, asked)
        if found.state != "nothing":
            return found
    return Found("nothing")


def _after(text: str, answer: Quantity | None, asked: Asked, is_cut: bool) -> Quantity | None:
    """``answer``, or what the text behind it puts in its place."""
    place = first_correction(text)
    explicit = last_explicit(text)
    if place is not None:
        if is_cut:
            return None
        last = last_correction(text) or place
        found = _prose(text[last:], asked)
        if found.state == "nothing" and last > place:
            found = _prose(text[place:], asked)
        if found.state == "nothing":
            return answer if is_check(text[place:]) or not re.search(r"\d|wrong|mistake|错", text[place:]) else None
        same = (
            found.quantity is not None
            and answer is not None
            and written(found.quantity, asked) == written(answer, asked)
        )
        if not same and answer is not None and is_check(text[place:]) and not found.has_cue:
            return answer
        return found.quantity
    if explicit is not None and not is_cut:
        found = _in_final(_first_said(text[explicit[1] :]), asked)
        return found.quantity if found.state != "nothing" else answer
    return answer


def _in_prose(text: str, asked: Asked, is_cut: bool) -> Quantity | None:
    explicit = last_explicit(text)
    if explicit is not None:
        said = _first_said(text[explicit[1] :])
        behind = text[explicit[1] + len(said) :]
        if not is_cut or behind.strip():
            return _after(behind, _in_final(said, asked).quantity, asked, is_cut)
    if is_cut:
        return _repeated(text, asked)
    place = last_correction(text)
    if place is not None:
        found = _prose(text[place:], asked)
        if found.state != "nothing":
            if is_check(text[place:]) and not found.has_cue and not asked.is_counted(text[place:]):
                before = _prose(text[:place], asked)
                return before.quantity if before.state == "one" else found.quantity
            return found.quantity
        # A change of mind that comes to nothing leaves what it was about in doubt.
        if re.search(r"\bwrong\b|\bmistake\b|\bnot\b|错", text[place:]) and not is_check(text[place:]):
            return None
    return _prose(text, asked).quantity


def _first_said(text: str) -> str:
    """The first statement of ``text``, with what stands before it."""
    lead = re.match(r"[\s:：*_\"“(\[-]{0,40}", text)
    begin = lead.end() if lead else 0
    end = re.compile(r"\n|(?<=[^\s\d])[.!?]\s|(?<=\d)[.!?]\s{1,4}(?=[^\s])|[。！？]").search(text, begin)
    return text[: end.end()] if end else text


def _repeated(text: str, asked: Asked) -> Quantity | None:
    """The one value that a cut output says again and again."""
    found = quantities_in(text)
    values = {written(replace(one, aside=""), asked) for one in found[:-1]}
    words = set(re.findall(r"[^\W\d_]+", text))
    return found[0] if len(found) > _MOST_EQUAL and len(values) == 1 and len(words) <= _MOST_EQUAL else None


def _prose(text: str, asked: Asked) -> Found:
    """The last statement of ``text`` that says what was asked for."""
    weak: Found | None = None
    said = statements(text)
    if len(said) == 1 and asked.noun:
        # "Them" are what is counted, where nothing else was named before.
        said = [_OF_THEM_ALONE.sub(r"\1", said[0])]
    is_list = _is_list(said)
    for place in range(len(said) - 1, -1, -1):
        one = said[place]
        if is_beside_the_point(one) and len(said) > 1:
            continue
        found = _row(one, asked) if table_cells(one) else _line(one, asked, is_list)
        if found.state == "nothing":
            if asked.dimensions and _COMPARES.search(one) and place > 0:
                return Found("unclear")
            continue
        if not found.is_weak:
            # "There were 12. Five of them were eaten": the 12 is not what is left.
            is_whole = asked.states_left(one) and (not asked.modifiers or asked.modifiers & set(one.lower().split()))
            return found if weak is None or is_whole else weak
        weak = weak or found
    return weak or Found("nothing")


def _is_list(said: list[str]) -> bool:
    """Whether several lines give a value each: labelled ones, or bare numbers."""
    said = [one for one in said if not is_beside_the_point(one)]
    labelled = sum(1 for one in said if (sides := label_and_value(one)) and re.search(r"\d", sides[1]))
    bare = {one for one in said if re.fullmatch(r"[-+]?[0-9.]{1,20}\W{0,3}", one)}
    return labelled >= 2 or len(bare) >= _MOST_EQUAL


def _row(statement: str, asked: Asked) -> Found:
    cells = table_cells(statement)
    is_total = _TOTAL.search(cells[0]) or (asked.noun and asked.is_counted(cells[0]))
    found = read_statement(cells[-1], asked)
    return found if found.state != "one" or is_total else Found("unclear")


def _line(statement: str, asked: Asked, is_list: bool) -> Found:
    found = read_statement(statement, asked)
    if not is_list or found.state != "one" or found.has_cue:
        return found
    sides = label_and_value(statement)
    if sides is None:
        return Found("unclear") if re.fullmatch(r"[-+]?[0-9.]{1,20}\W{0,3}", statement) else found
    words = set(re.findall(r"[a-z]{4,20}", sides[0].lower()))
    is_asked = _TOTAL.search(sides[0]) or words & asked.words or asked.is_counted(sides[0])
    return found if is_asked else Found("unclear")
