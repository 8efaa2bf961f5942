"""Multiple choice and multiple select: the letters that an answer names. Yes or no: which of the two it says."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Literal

from vlm_pg.answers.clauses import affirmed, boxed_statement, clauses, phrases, without_lead_in
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
from vlm_pg.answers.plain_text import DECORATION, WORD_LETTER, plain_formula, plain_short, without_marks
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


Side = Literal["yes", "no"]

_SIDES: dict[str, Side] = {
    "yes": "yes", "yeah": "yes", "yep": "yes", "true": "yes", "correct": "yes",
    "no": "no", "nope": "no", "false": "no", "incorrect": "no",
}  # fmt: skip
_ADJECTIVES = ("true", "false", "correct", "incorrect")
# A whole clause in other languages; the letters too are answers only by themselves.
_WHOLE_YES = """y t affirmative absolutely certainly 是 是的 是啊 对 对的 没错 正确 有 有的 会 会的 能 可以 真
    はい ええ 네 예 그렇습니다 да верно sí si sim oui ja tak نعم हाँ हां evet có vero vrai verdadero"""
_WHOLE_NO = """n f negative nah 否 不 不是 不是的 不对 不正确 错 错误 没有 没 不会 不能 不可以 不行 假
    いいえ いえ 違います 아니요 아니오 아닙니다 нет неверно não nao nein falsch non nie nej nee لا नहीं hayır không"""
_WHOLE: dict[str, Side] = {**dict.fromkeys(_WHOLE_YES.split(), "yes"), **dict.fromkeys(_WHOLE_NO.split(), "no")}
_WHOLE |= dict.fromkeys(("not at all", "absolutely not", "certainly not", "definitely not", "of course not"), "no")
_CLAUSE_END = re.compile(r"[,.;:!?。，；：！？、\n]")
_WORD = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9_'’-])(?P<word>{'|'.join(_SIDES)})(?!{WORD_LETTER}|[0-9_]|[-'’]\w)(?P<alone>\s{{0,4}}(?:$|[^\w\s]))?",
    re.IGNORECASE,
)
# Both are looked for in the few characters before a word.
_NEGATED = re.compile(
    r"(?:\b(?:not|never|cannot|nor|neither)|n['’]t)\s{1,4}(?:(?!but\b)\w{1,12}\s{1,4}){0,2}$", re.IGNORECASE
)
_INTRODUCED = re.compile(r"\b(?:answer|answer\s{1,4}is|say|or)[\s:*\"'{]{1,6}$", re.IGNORECASE)
# "No" before these says nothing of the question, or not no; "no. 5" is a number.
_NO_ANSWER = re.compile(
    r"\.?\s{0,3}[0-9]|\s{1,4}(?:"
    + phrases("real, good, clear, definite, further, more, other, relevant, single")
    + r"\s{1,4})?"
    + phrases(
        "idea, ideas, comment, comments, answer, answers, clue, opinion, information, info, data, context, "
        "way to, way of, one, body, "
        "doubt, doubts, question, problem, matter, wonder, longer, less, more, fewer, sooner, response, reply, "
        "judgement, judgment, reason, reasons, explanation, evidence, certainty, decision, verdict, guess, "
        "conclusion, knowledge, option, choice, preference, need, thanks, thank, worries, video, image, "
        "sé, se, lo, estoy, puedo, tengo"
    )
    + r"\b",
    re.IGNORECASE,
)
_UNDECIDED = re.compile(
    r"\byes\s{0,3}(?:/|or)\s{0,3}no\b|\b(?:un|not\s{1,3})(?:sure|certain|clear)\b|"
    r"\b(?:can(?:not|['’]t)|could\s{1,3}not|do(?:n['’]t|\s{1,3}not)|unable\s{1,3}to)\s{1,3}(?:know|tell|say|determine)\b|(?<!答案)是否|"
    # Two negations are more than is read here: "it is false that there is no car".
    r"\b(?:false|incorrect|wrong)\s{1,3}that\b.{0,200}?(?:\bno[tr]?\b|\bnever\b|n['’]t\b)|"
    r"不知道|不确定|不清楚|无法",
    re.IGNORECASE,
)
_CHARACTERS_BEFORE = 32
_DECORATION = "*_`\"'“”‘’$.,;:!?()[]{} \t\r\n。！？，"


def check_yes_no(answer: str, sample: Sample, settings: GraderSettings) -> Verdict:
    """1.0 if ``answer`` says the same of yes and no as the gold answer, else 0.0.

    Understood: "yes", "True", "y", "No.", "Yes, because there is no car", "The answer is no.", "not true", and
    yes and no of other languages as a clause: "是的", "Нет.". An answer that says both, or neither ("No idea"), is
    wrong; a gold answer that does is "no value".
    """
    gold = stated_sides(sample.answer)
    if len(gold) != 1:
        return Verdict(None, f"gold answer {shorten(sample.answer)} says neither yes nor no, or both")
    stated = stated_sides(answer)
    if len(stated) != 1:
        return Verdict(0.0, "answer says both yes and no" if stated else "answer says neither yes nor no")
    return Verdict(1.0 if stated == gold else 0.0)


def stated_sides(text: str) -> set[Side]:
    """Which of yes and no ``text`` says: none, one or both. What is in a box counts, beside the rest."""
    boxed = boxed_statement(text)
    return _sides(text) | (_sides(boxed) if boxed else set())


def _sides(text: str) -> set[Side]:
    bare = without_lead_in(without_marks(plain_short(text)).strip(_DECORATION))
    sides = _sides_of_words(bare)
    if sides is None:
        return set()
    for clause in _CLAUSE_END.split(bare):
        whole = clause.strip(_DECORATION).lower()
        # A letter is an answer only where nothing else is stated.
        if whole in _WHOLE and (len(bare) == 1 or len(whole) > 1 or not whole.isascii()):
            sides.add(_WHOLE[whole])
    return sides


def _sides_of_words(text: str) -> set[Side] | None:
    """The sides that English words state; None if the text says that it does not know."""
    sides: set[Side] = set()
    for match in _WORD.finditer(text):
        word = match["word"].lower()
        before = text[max(0, match.start() - _CHARACTERS_BEFORE) : match.start()]
        # Before a noun "no" is no answer ("there is no car") unless the text begins with it.
        within = match["alone"] is None and bool(before) and not _INTRODUCED.search(before)
        if word == "no" and (within or _NO_ANSWER.match(text, match.end("word"))):
            continue
        negated = _NEGATED.search(before) is not None
        if negated and word not in _ADJECTIVES:
            continue  # "yes, not no"; "I cannot say yes" says neither
        side = _SIDES[word]
        sides.add(side if not negated else "no" if side == "yes" else "yes")
    return None if len(sides) < 2 and _UNDECIDED.search(text) else sides
