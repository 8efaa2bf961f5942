"""Who did what when, as far as words without grammar tell it: another person, another order, what was not done."""

from __future__ import annotations

import re

from vlm_pg.eval.reading.stems import words_in

_FEMALE = frozenset(words_in("woman girl lady mother grandmother sister daughter wife actress waitress aunt queen"))
_MALE = frozenset(words_in("man boy gentleman father grandfather brother son husband actor waiter uncle king"))
_DOER = re.compile(
    r"(?:^\W{0,4}|\bby\s)(?:the|an?|another)\s(\w{2,15}(?:\s\w{2,15})?)\b",
    re.IGNORECASE,
)
_SOMEONE_ELSE = re.compile(r"\b(?:someone|somebody)\selse\b|\banother\s(?:man|woman|person|boy|girl)\b", re.IGNORECASE)
_UNDONE = re.compile(
    r"\b(?:refus|forg[eo]t|fail|declin|neglect|hesitat|try|tri|attempt)\w{0,4}\sto\b|\bcould\b(?!\sbe\b)|"
    r"\b(?:ask|tell|told|order|beg|want|remind)\w{0,3}\s(?:her|him|them|(?:the|his|her|a)\s\w{2,15})\s(?:not\s)?to\b|"
    r"\b(?:unclear|unknown|uncertain|not\sclear)\s(?:whether|if)\b",
    re.IGNORECASE,
)
_ORDER = re.compile(r"\b(after|before)\b\s([^,.;?]{1,200})", re.IGNORECASE)
_THAN = re.compile(r"\b(\w{2,12}er|(?:more|less)\s\w{2,15})\sthan\b", re.IGNORECASE)
_JOINT = re.compile(r"\b(before|after)\b", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|never|no|nobody|none|neither|cannot|only|long|fails?|if|whether|might|may|could|would|should|either|or)\b|n['’]t\b|[?？].",
    re.IGNORECASE,
)
_IDLE = frozenset(
    words_in("the a an he she it they his her their has have had been was were is are to of and then do does")
)


def is_of_another(sentence: str, question: str) -> bool:
    """Whether the doer in ``sentence`` is of the other sex than the only persons of ``question``, or someone else.

    ``question``: with the texts of its options.
    """
    if _SOMEONE_ELSE.search(sentence) and not _SOMEONE_ELSE.search(question):
        return True
    asked = set(words_in(question))
    doers = {word for found in _DOER.finditer(sentence) for word in words_in(found[1])}
    return any(
        asked & one and not asked & other and doers & other for one, other in ((_MALE, _FEMALE), (_FEMALE, _MALE))
    )


def is_undone(clause: str) -> bool:
    """Whether ``clause`` tells of what was refused, forgotten, only tried or asked of another, or is not known."""
    return _UNDONE.search(clause) is not None


def keeps_either(sentence: str, question: str) -> bool | None:
    """As ``keeps_order``, or as ``keeps_comparison`` where no order is told."""
    is_kept = keeps_order(sentence, question)
    return keeps_comparison(sentence, question) if is_kept is None else is_kept


def keeps_order(sentence: str, question: str) -> bool | None:
    """Whether ``sentence`` has the two events of ``question`` in the order asked about; None where that is not told.

    Each of the two is an event of the question where its words are that event's, at least half of them, and one of
    them is not the other event's.

    keeps_order("He waits before she sings", "Does she sing before he waits?") -> False
    """
    asked, told = _two_events(question), _two_events(sentence)
    if asked is None or told is None or _DENIED.search(sentence) or _DENIED.search(question):
        return None
    is_kept = _is_event(told[0], asked[0], asked[1]) and _is_event(told[1], asked[1], asked[0])
    is_turned = _is_event(told[0], asked[1], asked[0]) and _is_event(told[1], asked[0], asked[1])
    return is_kept if is_kept != is_turned else None


def keeps_comparison(sentence: str, question: str) -> bool | None:
    """Whether ``sentence`` compares the two things of ``question`` the same way round; None where that is not told.

    keeps_comparison("The tree is taller than the lamp", "Is the lamp taller than the tree?") -> False
    """
    asked, told = _two_compared(question), _two_compared(sentence)
    if asked is None or told is None or asked[0] != told[0] or _DENIED.search(sentence) or _DENIED.search(question):
        return None
    is_kept = _is_event(told[1], asked[1], asked[2]) and _is_event(told[2], asked[2], asked[1])
    is_turned = _is_event(told[1], asked[2], asked[1]) and _is_event(told[2], asked[1], asked[2])
    return is_kept if is_kept != is_turned else None


def _two_compared(text: str) -> tuple[str, set[str], set[str]] | None:
    """The comparative of ``text``, and the words of the two things that it holds between."""
    joints = list(_THAN.finditer(text))
    if len(joints) != 1:
        return None
    [joint] = joints
    sides = [set(words_in(side)) - _IDLE for side in (text[: joint.start()], text[joint.end() :])]
    return joint[1].lower(), sides[0], sides[1]


def _two_events(text: str) -> tuple[set[str], set[str]] | None:
    """The words of the earlier and of the later of two events that "before" or "after" joins."""
    joints = list(_JOINT.finditer(text))
    if len(joints) != 1:
        return None
    [joint] = joints
    first, second = text[: joint.start()], text[joint.end() :]
    if not words_in(first):
        second, comma, first = second.partition(",")
        if not comma:
            return None
    one, other = set(words_in(first)) - _IDLE, set(words_in(second)) - _IDLE
    return (one, other) if joint[1].lower() == "before" else (other, one)


def _is_event(told: set[str], event: set[str], other: set[str]) -> bool:
    return told <= event and len(told) * 2 >= len(event) and bool(told & (event - other))


def is_in_other_order(sentence: str, question: str) -> bool:
    """Whether ``sentence`` tells of what was before an event where ``question`` asks what was after it, or the reverse.

    is_in_other_order("He opens it before he reads the letter", "What does he do after he reads the letter?") -> True
    """
    orders = list(_ORDER.finditer(question))
    if len(orders) != 1:
        return False
    side, event = orders[0][1].lower(), set(words_in(orders[0][2])) - _IDLE
    for found in _ORDER.finditer(sentence):
        told = set(words_in(found[2])) - _IDLE
        if told & event and found[1].lower() != side:
            return True
        rest = set(words_in(sentence[: found.start()] + " " + sentence[found.end() :]))
        if told and not told & event and found[1].lower() == side and event <= rest:
            return True
    return False
