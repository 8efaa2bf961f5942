"""Options' whole texts in what is said, masked by words of their own, so that the letters in them are none."""

from __future__ import annotations

import re
from collections.abc import Collection

from vlm_pg.answers.options import Choices, folded
from vlm_pg.answers.plain_text import NO_GAPS
from vlm_pg.eval.reading.formulas import FORMULAS
from vlm_pg.eval.reading.stems import stem
from vlm_pg.eval.reading.symbols import SymbolicOptions

_AGREEING = re.compile(
    r"\b(?:that|you|this)(?:['’]s|['’]re|\sis|\sare)\s(?:quite\s|absolutely\s)?right\b(?!\s(?:hand|side|of))|"
    r"^\W{0,4}(?:all\s)?right\s?[,!.](?=\s\S)|\bright(?=\s(?:answers?|options?|choices?|one|now)\b)|,\sright(?=\?)",
    re.IGNORECASE,
)
_LEAVING = re.compile(
    r"\b(?:has|have|had|is|was|been)\s(?:\w{1,12}\s)?left(?=\s(?:the|his|her|their|it|a|an|by)\b)", re.IGNORECASE
)
_FROM = re.compile(r"\bfrom\s(?:the\s)?[\w-]{1,30}(?=\sto\s)", re.IGNORECASE)
PLACEHOLDER = "optxt"
# Where a text of another script touches one that has no gaps between words: "答案是3 cups".
_TOUCHING = re.compile(f"(?<=[{NO_GAPS}])(?=[^\\W{NO_GAPS}])|(?<=[^\\W{NO_GAPS}])(?=[{NO_GAPS}])")
_MASK = re.compile(rf"\b{PLACEHOLDER}([A-Z])\b")
_LABELLED = re.compile(r"\b([a-z]{3,20})\s([A-Z])\b(?!['’])", re.IGNORECASE)
_NO_CHANGE_OPTION = re.compile(r"(?:nothing|no)\b.{0,20}\b(?:chang|differ)", re.IGNORECASE)
_NO_CHANGE = re.compile(
    r"\bno\s(?:difference|change)s?\b|\bnothing\s(?:\w{1,10}\s)?(?:chang|differ)\w{1,4}\b", re.IGNORECASE
)


class OptionMasks:
    """Masks and unmasks the texts of one question's options.

    Args:
        choices: the options, letters and texts.
        asked: the stems of the question's words.
        symbolic: those of the options that are numbers and formulas.
    """

    def __init__(self, choices: Choices, asked: Collection[str], symbolic: SymbolicOptions) -> None:
        self._choices, self._asked, self._symbolic = dict(choices), asked, symbolic
        self._has_from = any(re.search(r"\bfrom\b", text, re.IGNORECASE) for text in self._choices.values())
        longest_first = sorted(((letter, folded(text)) for letter, text in choices), key=lambda pair: -len(pair[1]))
        self._masks = [
            (letter, _whole_pattern(text))
            for letter, text in longest_first
            if len(text) > 1 and letter not in symbolic.letters
        ]
        self._masks += [(letter, _NO_CHANGE) for letter, text in longest_first if _NO_CHANGE_OPTION.match(text)]
        self._labels = {text: letter for letter, text in choices if len(text) == 1 and text.isalpha()}

    def masked(self, text: str) -> str:
        """``text`` with a word of its own in place of each option's whole text, so that its letters are none."""
        text = _LEAVING.sub(" ", _AGREEING.sub(" ", text))
        text = text if self._has_from else _FROM.sub(" ", text)
        apart = _TOUCHING.sub(" ", text)
        if apart != text and any(one.search(apart) and not one.search(text) for _, one in self._masks):
            text = apart
        for letter, pattern in self._masks:
            text = pattern.sub(f" {PLACEHOLDER}{letter} ", text)
        text = self._symbolic.replaced(text, lambda letter: f" {PLACEHOLDER}{letter} ")
        return _LABELLED.sub(self._mask_label, text) if self._labels else text

    def unmasked(self, text: str) -> str:
        """``text`` with options' texts in place of the words that mask them."""
        return " ".join(_MASK.sub(lambda mask: self._choices.get(mask[1], ""), text).split())

    def _mask_label(self, found: re.Match[str]) -> str:
        letter = self._labels.get(found[2])
        return f"{PLACEHOLDER}{letter} " if letter and stem(found[1]) in self._asked else found[0]


def _whole_pattern(text: str) -> re.Pattern[str]:
    words = r"\s{1,3}".join(re.escape(word) for word in text.split())
    has_gaps = re.search(f"[{NO_GAPS}]", text) is None
    formula = FORMULAS.get(text)
    either = rf"(?:{words}|{formula})" if formula else words
    # A sign, a digit or a decimal point beside a number makes it another one.
    before = r"(?<![-+.,/:^$€£])" if text[:1].isdigit() else ""
    after = r"(?![.,/:^-]?[0-9]|\s?[%°^*/])" if text[-1:].isdigit() else ""
    return re.compile(rf"(?<![\w'’]){before}{either}{after}(?![\w'’])" if has_gaps else either, re.IGNORECASE)


def placeholders(text: str) -> frozenset[str]:
    """The letters of the options whose whole texts are masked in ``text``."""
    return frozenset(match[1] for match in _MASK.finditer(text))


def without_placeholders(text: str) -> str:
    """``text`` without the words that mask options' texts."""
    return _MASK.sub(" ", text)
