"""Yes or no: which of the two an answer says."""

from __future__ import annotations

import re
from typing import Literal

from vlm_pg.answers.clauses import boxed_statement, phrases, without_lead_in
from vlm_pg.answers.plain_text import WORD_LETTER, plain_short, without_marks
from vlm_pg.answers.verdict import GraderSettings, Verdict, shorten
from vlm_pg.types import Sample

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
