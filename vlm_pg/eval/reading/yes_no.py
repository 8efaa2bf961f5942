"""Yes and no: which of the two an output says, in a word or by stating or denying what was asked."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal

from vlm_pg.answers.yes_no import stated_sides
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.events import keeps_either
from vlm_pg.eval.reading.opposites import OPPOSITES, PERSONS, says_opposite
from vlm_pg.eval.reading.phrasing import concludes, corrects, gives_up, is_question, sentences
from vlm_pg.eval.reading.said import field_of_object, plain_said
from vlm_pg.eval.reading.stems import stem, words_in
from vlm_pg.eval.reading.thinking import Said
from vlm_pg.types import Sample

Side = Literal["yes", "no"]

_ALONE = re.compile(
    r"(?:^|\b(?:answer(?:\sis)?|say|it\sis|it['’]s|so|therefore|thus|hence|then)\s?[:,]?\s?|"
    r"[:,]\s)[\"'“(]?(?:yes|no|nope|yeah|yep|true|false|correct|incorrect)\b[\"'”)]?\s{0,3}(?:$|[,.;:!—-])",
    re.IGNORECASE,
)
_BY_THE_WAY = re.compile(
    r"^\W{0,4}(?:no\s(?:problem|doubt(?:\sabout\s(?:it|that))?|worries|question(?:\sabout\s(?:it|that))?)|"
    r"there\s(?:is|['’]s)\sno\s(?:doubt|question)|without\s(?:a\s)?doubt)\b(?:\s?[,!.:—-]|\s(?:about|that)\b)?\s{0,3}",
    re.IGNORECASE,
)
_UNDECIDED = re.compile(
    r"\byes\s?(?:/|or|and)\s?no\b|^\W{0,4}(?:i['’]?\s?a?m\s)?(?:not|un)\s?(?:sure|certain|clear)\W{0,3}$|"
    r"\bnot\senough\b",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"^\W{0,4}(?:i['’]?\s?a?m\s)?(?:not\s(?:\w{1,12}\s)?|un)(?:sure|certain)[^.]{0,40}?,?\s?(?:but|yet|though)\s",
    re.IGNORECASE,
)
_ELLIPSIS = re.compile(
    r"(?:^|[,:]\s)\s?(?:yes\s)?(?:i\sthink\s|indeed\s)?(?:it|he|she|they|there|we|i|the\s\w{1,20}|that|"
    r"this)\s(?:really\s|clearly\s|indeed\s|definitely\s)?"
    r"(?P<verb>is|are|was|were|does|do|did|has|have|can|will)(?P<not>n['’]t|\snot)?(?:\sindeed)?\W{0,3}$",
    re.IGNORECASE,
)
_AT_TIME = re.compile(
    r",?\s(?:at|around)\s(?:about\s)?[0-9][0-9:.]{0,8}(?:\s?s(?:ec(?:ond)?s?)?)?(?=\W{0,3}$)", re.IGNORECASE
)
_NO_ONE = re.compile(r"\bno\sone\b", re.IGNORECASE)
_NONE_THERE = re.compile(r"\b(?:nobody|nothing|none|no\s(?!longer|more|doubt)[a-z]{2,20})\b", re.IGNORECASE)
_WORD_DENIED = re.compile(
    r"\b(?:yes|no)\b[\"'”]?\s(?:is|was|would\sbe)(?:n['’]t|\s(?:not|wrong|incorrect))\b", re.IGNORECASE
)
_WRONG_TO_SAY = re.compile(
    r"\b(?:wrong|incorrect|false|inaccurate|mistaken|a\smistake|misleading)\sto\s(?:say|answer|claim|conclude|state)\b",
    re.IGNORECASE,
)
# "Does he open it?" "Yes, but he does not open it."
_YES_BUT_NOT = re.compile(
    r"\W{0,4}(?:but|although|though|however)\W{1,3}(?:it|he|she|they|there|we|i|the\s\w{1,20})\s"
    r"(?P<verb>is|are|was|were|does|do|did|has|have|can|will)(?:n['’]t|\snot)\s",
    re.IGNORECASE,
)
# "是的,但他没有打开": yes, but he did not open it.
_CHINESE_YES_BUT_NOT = re.compile(
    r"^\W{0,4}(?:是|对)的?\s?[,，。]?\s?(?:但|不过|然而|可是|只是)[^。!！?？]{0,30}(?:没|不(?!过)|未|并非)"
)
_UNTRUE = re.compile(r"(?:\bnot|n['’]t)\s(?:true|correct|right|the\scase)\sthat\b", re.IGNORECASE)
_CONCEDES = re.compile(r"^[^:]{1,30}:\W{0,4}(?:yes|no)\b[^.]{0,200}?\b(?:but|however)\b", re.IGNORECASE)
_DENIES = re.compile(
    r"\b(?:not|never|no|nobody|none|neither|cannot|nowhere|hardly)\b|n['’]t\b|\bfail(?:s|ed)?\sto\b", re.IGNORECASE
)
_DOUBLE = re.compile(
    r"^\W{0,4}(?:nothing|no\s\w{1,12})\s(?:suggests?|indicates?|speaks?|shows?)\s(?:otherwise|against\s(?:it|"
    r"that|this))\W{0,3}",
    re.IGNORECASE,
)
_COUNTER = re.compile(r"\b(?:counter|anti)[\s-](?=clockwise)", re.IGNORECASE)
_IDLE = frozenset(
    words_in(
        "a an the of to is are was were be been being it its he she they him his her them their i we you there "
        "that this these "
        "those in on at by for with from and so as do does did have has had any some sign evidence indication "
        "frame frames video "
        "image picture clip scene see seen show shows shown seem seems appear appears clear indeed actually "
        "here all one s t "
        "isn't aren't doesn't don't didn't wasn't weren't not no never into over nobody anyone anybody someone somebody"
    )
)
_FAILS = re.compile(r"\bfail(?:s|ed)?\sto\b", re.IGNORECASE)
_DOER = re.compile(r"\bthe\s(\w{2,10})\b", re.IGNORECASE)
_ANSWERS = re.compile(r"\W{0,4}(?:yes|no)\b", re.IGNORECASE)
_FALSE_THAT = re.compile(
    r"\b(?:false|wrong|incorrect|untrue|(?:not|n['’]t)\s(?:true|correct|right))\sthat\b", re.IGNORECASE
)
_LONGEST_RESTATEMENT = 24
_ASKS_ALL = re.compile(
    r"\W{0,3}(?:are|is|was|were|do|does|did|have|has|can)\s(?:all|every|each)\b(?:\s(?:one\s)?of\b)?", re.IGNORECASE
)
_OF_ALL = re.compile(r"\b(?:all|every|each|both|any|0|zero|at\smost|up\sto|if|less|fewer)\b", re.IGNORECASE)
_PART = re.compile(
    r"\b(?:(?:at\sleast\s|only\s|just\s)?(?:[1-9][0-9]{0,3}|one|two|three|four|five|six|seven|eight|nine|ten)|some|several|many|most|"
    r"(?:a\s)?few|half|part)(?:\sof\b|(?=\s))",
    re.IGNORECASE,
)
_IF = re.compile(r"\W{0,4}if\s(?!(?:i|we|you)\b|forced|asked)", re.IGNORECASE)
_EXPLAINS = re.compile(r"\W{0,4}(?:explanation|reason|reasoning|rationale|justification)\W{0,4}:", re.IGNORECASE)
_LEADING_WORD = re.compile(r"^\W{0,4}(?:yes|no)\W{1,4}(?=\w)", re.IGNORECASE)
# Relations that are turned round when the two they hold between are: "A is left of B".
_BETWEEN_TWO = frozenset(
    words_in(
        "bigger smaller larger left right faster slower higher lower above below more fewer less longer shorter taller "
        "lighter darker brighter before after front behind inside"
    )
)


def read_yes_no(sample: Sample, said: Said) -> Reading:
    """ "yes" or "no", the last that is said; 1.0 if the gold answer says the same.

    A sentence that states what was asked, or what is opposite to it, says the same as a word does.
    """
    gold = stated_sides(sample.answer)
    if len(gold) != 1:
        return Reading(None, None, "gold answer says neither yes nor no, or both")
    side = _side_of_said(sample.question, said)
    if side is None:
        return Reading(None, 0.0, "neither yes nor no is said, or both are")
    return Reading(side, 1.0 if {side} == gold else 0.0)


def _side_of_said(question: str, said: Said) -> Side | None:
    whole = field_of_object(said.final or said.text)
    if whole is not None:
        return side_of(whole, question)
    if said.final is None:
        return side_of(said.text, question)
    side = side_of(said.final, question)
    if any(side_of(other, question) != side for other in said.beside):
        return None
    later = side_of(said.after, question) if corrects(said.after) else None
    return later or side


def side_of(text: str, question: str) -> Side | None:
    """Which of yes and no ``text`` says to ``question``; None: neither, or both."""
    question = _NO_ONE.sub("nobody", question)
    told = [_NO_ONE.sub("nobody", one) for line in plain_said(text).splitlines() for one in sentences(line)]
    side: Side | None = None
    asked_back: Side | None = None
    is_corrected = was_concluded = is_open = False
    for sentence in told:
        is_explained = side is not None and _EXPLAINS.match(sentence) is not None
        if is_explained and _CONCEDES.search(sentence):
            continue
        is_corrected = is_corrected or (side is not None and not is_explained and corrects(sentence))
        if is_question(sentence) or _IF.match(sentence):
            asked_back = _restated(sentence.rstrip("?？ "), question) if is_question(sentence) else None
            continue
        found = _sides(sentence, question, is_first=side is None and not is_open)
        if found and asked_back == "no" and _ANSWERS.match(sentence):
            # "Two are closed? Yes": what is affirmed or denied is what the output asks itself.
            found = {"no"} if found == {"yes"} else {"yes", "no"}
        asked_back = None
        if len(found) > 1:
            side, is_open = None, True
        elif found:
            (new,) = found
            concluded = concludes(sentence)
            if (side not in (None, new) or is_open) and not (is_corrected or (concluded and not was_concluded)):
                side, is_open = None, True
            else:
                side, is_open, was_concluded = new, False, concluded
                is_corrected = corrects(sentence)
    return side


def _sides(sentence: str, question: str, is_first: bool) -> set[Side]:
    """What one sentence says of yes and no."""
    sentence = _HEDGE.sub("", _BY_THE_WAY.sub("", sentence))
    if (
        _WORD_DENIED.search(sentence)
        or _WRONG_TO_SAY.search(sentence)
        or ((denial := _UNTRUE.search(sentence)) and _DENIES.search(sentence, denial.end()))
    ):
        return set()
    if (false := _FALSE_THAT.search(sentence)) and keeps_either(sentence[false.end() :], question) is False:
        return set()  # that it is false the other way round says nothing of this way
    if _UNDECIDED.search(sentence):
        return {"yes", "no"} if re.search(r"\byes\s?and\s?no\b", sentence, re.IGNORECASE) else set()
    is_explicit = is_first or _ALONE.search(sentence) is not None
    found = stated_sides(sentence) if is_explicit else set()
    if len(found) > 1 and corrects(sentence):
        # "No, wait: yes."
        parts = [stated_sides(part) for part in re.split(r"[,.:;—]", sentence)]
        stated = [part for part in parts if part]
        found = stated[-1] if stated else set()
    if found == {"yes"} and (lead := _LEADING_WORD.match(sentence)):
        denied = _YES_BUT_NOT.match(sentence, lead.end())
        if denied and (set(words_in(question)) - _IDLE) & set(words_in(sentence[denied.end() :])):
            return {"yes", "no"}
    if found == {"yes"} and _CHINESE_YES_BUT_NOT.search(sentence):
        return {"yes", "no"}
    if len(found) == 1 and (lead := _LEADING_WORD.match(sentence)) and not corrects(sentence[lead.end() :]):
        rest = sentence[lead.end() :]
        if _has_other_number(rest, question) and found == {"yes"}:
            return {"yes", "no"}
        if (told := _restated(rest, question, is_full=True)) and {told} != found:
            return {"yes", "no"}
    if found or gives_up(sentence):
        return found
    side = _restated(sentence, question) if is_first else None
    return {side} if side else set()


def _has_other_number(sentence: str, question: str) -> bool:
    """Whether a sentence counts as many others of what the question counts: "three dogs" for "two dogs"."""
    asked, told = _counts(question), _counts(sentence)
    same = asked.keys() & told.keys()
    return any(not asked[noun] & told[noun] for noun in same)


def _counts(text: str) -> dict[str, set[str]]:
    words = words_in(text)
    counts: dict[str, set[str]] = {}
    for number, noun in pairwise(words):
        if number.isdecimal() and noun.isalpha():
            counts.setdefault(noun, set()).add(number)
    return counts


def _is_turned_round(sentence: str, question: str) -> bool:
    """Whether a sentence has the two that a question compares in the other order: "blue left of red"."""
    asked, told = words_in(question), words_in(sentence)
    if not _BETWEEN_TWO & set(asked) & set(told) and not any(
        pair & set(told) for pair in OPPOSITES if pair & set(asked)
    ):
        return False
    both = set(asked) & set(told) - _IDLE - _BETWEEN_TWO
    once = [word for word in asked if word in both and asked.count(word) == told.count(word) == 1]
    return bool(_BETWEEN_TWO & set(asked)) and once != [word for word in told if word in once]


def _restated(sentence: str, question: str, *, is_full: bool = False) -> Side | None:
    """Yes where ``sentence`` states what ``question`` asks, no where it denies that or states the opposite."""
    sentence = _COUNTER.sub("counter", _DOUBLE.sub("", sentence))
    if ellipsis := _ELLIPSIS.search(_AT_TIME.sub("", sentence)):
        return "no" if ellipsis["not"] else "yes"
    words = [word for word in words_in(sentence) if not word.endswith("li")]
    if len(words) > _LONGEST_RESTATEMENT:
        return None
    if (is_kept := keeps_either(sentence, question)) is not None:
        return "yes" if is_kept else "no"
    asks_all = _ASKS_ALL.match(question) is not None and not _OF_ALL.search(sentence)
    if asks_all and (part := _PART.search(sentence)):
        # Of some that are not so follows that not all are; of some that are so nothing follows.
        rest = _restated(sentence[: part.start()] + sentence[part.end() :], _ASKS_ALL.sub("Are ", question))
        return "no" if rest == "no" else None
    asked = set(words_in(question.split("\n", maxsplit=1)[0])) - _IDLE
    told = set(words_in(_FAILS.sub("", sentence))) & set(words) - _IDLE
    denied = _DENIES.search(sentence) is not None
    if (
        not denied
        and _has_other_number(sentence, question)
        and not {one for one in told if not one.isdecimal()} - asked
    ):
        return "no"
    # "Does the boy catch it?" "The girl catches it": that says nothing of him.
    pairs = tuple(pair for pair in OPPOSITES if pair not in PERSONS or not _is_doer(pair, question))
    opposite = says_opposite(told, asked, pairs)
    strange = told - asked - {word for pair in pairs if pair & asked for word in pair}
    if strange or not told:
        return None
    if _is_turned_round(sentence, question):
        return "no" if _is_swapped(words, words_in(question)) and not denied and not opposite else None
    if opposite:
        return None if denied else "no"
    if not told & asked or len(told & asked) * (1 if is_full else 3) < len(asked):
        return None
    if _NONE_THERE.search(question):
        return "yes" if _NONE_THERE.search(sentence) else None  # asked and said that there is none
    return "no" if denied else "yes"


def _is_doer(persons: frozenset[str], question: str) -> bool:
    """Whether a person of ``question`` is who does something in it, and not what somebody is asked to be."""
    return any(stem(word) in persons for word in _DOER.findall(question))


def _is_swapped(told: list[str], asked: list[str]) -> bool:
    """Whether two things, each named once, have changed places about the same relation: "B is left of A"."""
    relation = _BETWEEN_TWO & set(asked)
    named = [word for word in asked if word not in _IDLE | _BETWEEN_TWO and asked.count(word) == 1]
    same = len(relation) == 1 and relation == _BETWEEN_TWO & set(told)
    return same and len(named) == 2 and [word for word in told if word in named] == named[::-1]
