"""Which part of a sentence with options' texts says what is asked: not what is set aside, compared with or passed."""

from __future__ import annotations

import re
from collections.abc import Collection

from vlm_pg.eval.reading.option_masks import PLACEHOLDER, placeholders, without_placeholders
from vlm_pg.eval.reading.option_words import STOP, option_words
from vlm_pg.eval.reading.subjects import about_the_asked

_SET_ASIDE = re.compile(
    r"^\W{0,4}(?:although|though|while|whereas|even though|besides|apart from|unlike|"
    r"contrary to)\s[^,\n]{1,300}(?:,|$)|"
    r"\bnear\s(?:the|an?)\s[^,.\n]{1,40}",
    re.IGNORECASE,
)
# "Newton's method over random search", "Anna beats Ben": the second is not what is said.
_SECOND = re.compile(
    r"\b(?:over|ahead\sof|in\sfront\sof|instead\sof|rather\sthan|beats?|defeats?|overtakes?|outruns?)\s{1,3}(?:the\s|an?\s)?"
    r"optxt[A-Z]\b",
    re.IGNORECASE,
)
# "Red scores against blue": who it is scored against does not score.
_OPPONENT = re.compile(r"\b(?:against|versus)\s{1,3}(?:the\s{1,3}|an?\s{1,3})?optxt[A-Z]\b", re.IGNORECASE)
_AGAINST = re.compile(r"\b(?:against|versus|oppos\w{2,5}|lose|loses|lost|concede[sd]?)\b", re.IGNORECASE)
_EARLIER = re.compile(r"^[^,]{0,80}\bhad\sbeen\s[^,]{1,120}(?:,\s?(?:and\s|but\s)?|$)", re.IGNORECASE)
_EARLY = re.compile(r"\b(?:at\sfirst|initially|in\sthe\sbeginning|at\sthe\s(?:beginning|start))\b", re.IGNORECASE)
_LATE = re.compile(r"\b(?:at\sthe\s(?:very\s)?end|finally|eventually|in\sthe\send|last)\b", re.IGNORECASE)
_THEN = re.compile(r"[,;]\s(?:and\s|but\s)?(?:then|later|finally|in\sthe\send|at\sthe\send)\b", re.IGNORECASE)
_PASSED = re.compile(
    rf"\b(?:through|past|along|across)\s{{1,3}}(?:(?:the|an?|his|her|their)\s{{1,3}})?{PLACEHOLDER}[A-Z]\b",
    re.IGNORECASE,
)
_PASSING = re.compile(r"\b(?:through|past|along|across|pass\w{0,3})\b", re.IGNORECASE)
_AND_THEN = re.compile(r",\s(?:and\s|then\s)?|\sand\s", re.IGNORECASE)
_INSIDE = re.compile(
    rf"\b(?:in|on|at|under|inside|behind)\s{{1,3}}(?:(?:the|an?|his|her|their)\s{{1,3}})?{PLACEHOLDER}[A-Z]\b",
    re.IGNORECASE,
)
_FEWEST_ASKED = 2
_FEWEST_BESIDE = 2


class StatingParts:
    """Finds in sentences whose options' texts are masked what they say to one question.

    Args:
        question: the question's text.
        asked: the stems of its words.
    """

    def __init__(self, question: str, asked: Collection[str]) -> None:
        self._question, self._asked = question, frozenset(asked)
        self._asks_end = _LATE.search(question) is not None and _EARLY.search(question) is None

    def of(self, sentence: str) -> str:
        """``sentence`` without what it sets aside, tells of before, compares with or only passes."""
        sentence = _EARLIER.sub("", _SET_ASIDE.sub(" ", sentence))
        if len(placeholders(sentence)) < _FEWEST_BESIDE:
            return sentence
        if _AGAINST.search(self._question) is None:
            sentence = _OPPONENT.sub(" ", sentence)
        sentence = about_the_asked(_SECOND.sub(" ", sentence), self._asked, lambda part: len(placeholders(part)) == 1)
        return self._of_the_end(self._without_passed(sentence))

    def num_asked_in(self, sentence: str) -> int:
        """How many words of the question ``sentence`` has, little ones and those of options aside."""
        return len((self._asked - STOP) & set(option_words(without_placeholders(sentence))))

    def _of_the_end(self, sentence: str) -> str:
        """Of "he is happy at first, then sad" what comes last, where the end is asked for."""
        then = _THEN.search(sentence)
        if not self._asks_end or then is None or not _EARLY.search(sentence[: then.start()]):
            return sentence
        return sentence[then.end() :] if placeholders(sentence[then.end() :]) else sentence

    def _without_passed(self, sentence: str) -> str:
        """Of "he walks through the kitchen and sleeps in the hall" where he sleeps, if that is asked for.

        Only where the clause of the one option that is left says that it is in there, in words of the question.
        """
        shorter = _PASSED.sub(" ", sentence)
        if shorter == sentence or len(placeholders(shorter)) != 1 or _PASSING.search(self._question):
            return sentence
        last = next(one for one in _AND_THEN.split(shorter) if placeholders(one))
        return shorter if _INSIDE.search(last) and self.num_asked_in(last) >= _FEWEST_ASKED else sentence
