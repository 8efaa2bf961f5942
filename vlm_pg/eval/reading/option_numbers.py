"""Options that are numbers: which one a sentence states by its value, in whatever unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from vlm_pg.answers.clauses import affirmed
from vlm_pg.answers.numbers import ONES, TENS
from vlm_pg.answers.options import Choices
from vlm_pg.answers.plain_text import WORD_LETTER
from vlm_pg.answers.units import Unit, parse_unit
from vlm_pg.eval.reading.symbols import without_formulas

_SPELLED = {word: str(number) for number, word in enumerate([*ONES, TENS[0]])}
_SPELLED |= {"once": "1 times", "twice": "2 times", "thrice": "3 times"}
_SPELLED_OUT = re.compile(rf"\b(?:{'|'.join(_SPELLED)})\b", re.IGNORECASE)
_NUMBER = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9_.$€£¥₹])"
    r"(?P<currency>[$€£¥₹])?(?P<value>-?(?:[0-9]{1,12}(?:,[0-9]{3}){0,3}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}))(?![0-9])(?:\s{0,2}(?P<unit>°\s?[CF]?|[%¢]|"
    r"[^\W\d_]{1,12}(?:/[^\W\d_]{1,6}|\^?[23])?))?"
)
_OPEN = re.compile(
    r"\b(?:or\s(?:more|fewer|less|so)|at\s(?:least|most)|more\sthan|fewer\sthan|less\sthan|between|over|under)\b",
    re.IGNORECASE,
)
_TOTAL = re.compile(r"[^.:;]{0,3}\b(?:in\s(?:all|total)|altogether|overall)\b", re.IGNORECASE)
_CONCLUDES = re.compile(r"\b(?:so|therefore|thus|hence)\b|,\s(?:that\sis|i\.e\.),?\s", re.IGNORECASE)
_EXPLAINED = re.compile(r":\s|\bbecause\b|\bsince\b")
_PERCENT = Unit((("percent", 1),), Fraction(1), "%")


@dataclass(frozen=True)
class NumericOptions:
    """The values of options that are all numbers, with their unit where they have one that is known."""

    values: tuple[tuple[str, Fraction, Unit | None], ...]
    given: frozenset[Fraction] = frozenset()

    def named(self, sentence: str) -> frozenset[str] | None:
        """The options whose values a sentence affirms; empty: a value of none, or it is left open; None: no number."""
        text = without_formulas(_digits(affirmed(sentence)))
        if not any(self._of(match) for match in _NUMBER.finditer(text)):
            return frozenset() if _NUMBER.search(text) and len(text) < 80 else None
        if _OPEN.search(text):
            return frozenset()
        concluded = _CONCLUDES.split(text)[-1]
        text = concluded if any(self._of(match) for match in _NUMBER.finditer(concluded)) else text
        main = _EXPLAINED.split(text, maxsplit=1)[0]
        text = main if any(self._of(match) for match in _NUMBER.finditer(main)) else text
        found = list(_NUMBER.finditer(text))
        for match in found:
            if _TOTAL.match(text, match.end("value")):
                return self._of(match)
        if "=" in text:
            after = [match for match in found if match.start() > text.rindex("=")]
            return self._of(after[0]) if after and _value(after[0]) not in self.given else frozenset()
        named = [self._of(match) for match in found if _value(match) not in self.given or len(found) == 1]
        return frozenset().union(*named)

    def _of(self, match: re.Match[str]) -> frozenset[str]:
        value = _value(match)
        unit = _unit(match)
        exact = frozenset(letter for letter, own, own_unit in self.values if (own, own_unit) == (value, unit))
        return exact or frozenset(letter for letter, own, own_unit in self.values if _same(value, unit, own, own_unit))


def _value(match: re.Match[str]) -> Fraction:
    return Fraction(match["value"].replace(",", ""))


def _unit(match: re.Match[str]) -> Unit | None:
    written = match["unit"] or match["currency"] or ""
    return _PERCENT if written == "%" else parse_unit(written)


def _same(value: Fraction, unit: Unit | None, own: Fraction, own_unit: Unit | None) -> bool:
    if unit is None or own_unit is None:
        return value == own
    factor = unit.factor_to(own_unit)
    return factor is not None and value * factor == own


@lru_cache(maxsize=512)
def numeric_options(choices: Choices, question: str) -> NumericOptions | None:
    """The values of ``choices``; None unless each is one number and no other word but its unit."""
    values: list[tuple[str, Fraction, Unit | None]] = []
    rests: set[str] = set()
    for letter, text in choices:
        match = _NUMBER.fullmatch(_digits(text).strip())
        if match is None:
            return None
        unit = _unit(match)
        rests.add("" if unit or not match["unit"] else match["unit"].casefold().rstrip("s"))
        values.append((letter, _value(match), unit))
    distinct = {(value, unit.name if unit else "") for _, value, unit in values}
    # A value that the question gives is not told as the answer, but where the question lists all options.
    given = frozenset(_value(match) for match in _NUMBER.finditer(_digits(question)))
    given = frozenset() if all(value in given for _, value, _ in values) else given
    return NumericOptions(tuple(values), given) if len(distinct) == len(values) > 1 and len(rests) == 1 else None


def _digits(text: str) -> str:
    text = _SPELLED_OUT.sub(lambda word: _SPELLED[word[0].lower()], text)
    return re.sub(r"\btimes\s+times\b", "times", text)
