"""Multiple choice: which letter an answer names."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

_LABEL = re.compile(r"\(?([A-Za-z])(?:[.:]\)?|\)[.:]?)(?:\s+(.*)|$)|\(?([A-Za-z])\)?$", re.DOTALL)
_NAMED = re.compile(r"\b(?:option|choice|letter)\s{1,3}\(?([A-Za-z])\b(?!')", re.IGNORECASE)
_BRACKETED = re.compile(r"\(([A-Za-z])\)|(?<![\w(])([A-Za-z])\)")
_STATED = re.compile(r"\b(?:answer|it)\s{0,3}(?:is|:)\s{0,3}([A-Za-z])(?=\s*(?:[.,;:!]|$))", re.IGNORECASE)
_CAPITAL = re.compile(r"(?<![\w'’])([A-Z])(?![\w'’])")
# A capital A before one of these, or before no word at all, is a letter; before any other word it is the article.
_AFTER_LETTER = re.compile(r"\s*(?:$|[^\w\s]|(?:or|and|is|was|because|since|as|but|not|then)\b)")
_DECORATION = "*_`\"'“”‘’$ \t\r\n"
_WRAPPERS = re.compile(r"\\(?:boxed|text|mathrm|textbf)\s?\{([^{}]{0,400})\}")


def check_multiple_choice(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` names the gold option and no other, else 0.0.

    Understood: "B", "b", "B.", "(B)", "b)", "Option B", "B. red", "The answer is B", and the text of the option. Two
    different letters are wrong, even if one of them is right. The gold answer may be spelled in the same ways.
    """
    gold = named_letters(sample.answer, sample.options)
    if len(gold) != 1:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not name one option")
    if sample.options and not gold <= {letter for letter, _ in split_options(sample.options)}:
        return Verdict(None, f"gold answer {shorten(sample.answer)} is not one of the {len(sample.options)} options")
    named = named_letters(answer, sample.options)
    if not named:
        return Verdict(0.0, "answer names no option")
    if len(named) > 1:
        return Verdict(0.0, f"answer names several options: {', '.join(sorted(named))}")
    return Verdict(1.0 if named == gold else 0.0)


def split_options(options: Sequence[str]) -> list[tuple[str, str]]:
    """Letter and text of each option: "B. red" -> ("B", "red"). Options without labels are lettered in order."""
    labelled = [re.match(r"\s*\(?([A-Za-z])[.):]\s*(.*)", option, re.DOTALL) for option in options]
    if options and all(labelled):
        return [(match[1].upper(), match[2].strip()) for match in labelled if match]
    return list(zip(string.ascii_uppercase, (option.strip() for option in options), strict=False))


def named_letters(text: str, options: Sequence[str]) -> set[str]:
    """The letters (upper case) of all options that ``text`` names, by letter or by the option's whole text."""
    plain = _plain(text)
    choices = [(letter, _plain(option)) for letter, option in split_options(options)]
    if len(plain) == 1 and plain.isascii() and plain.isalpha():
        return {plain.upper()}
    by_text = {letter for letter, option in choices if option and _same(plain, option)}
    if by_text:
        return by_text
    label = _LABEL.match(plain)
    if label is None:
        return _letters_in_sentence(plain)
    letter = (label[1] or label[3]).upper()
    rest = _plain(label[2] or "")
    if any(_same(rest, option) for own, option in choices if own == letter):
        return {letter}
    return {letter} | {own for own, option in choices if _same(rest, option) and rest} | _letters_in_sentence(rest)


def _letters_in_sentence(text: str) -> set[str]:
    """Letters named inside running text: "the answer is B", "option b", "(b)", or a capital that stands alone."""
    letters = {match[1] for pattern in (_NAMED, _STATED) for match in pattern.finditer(text)}
    letters |= {match[1] or match[2] for match in _BRACKETED.finditer(text)}
    for match in _CAPITAL.finditer(text):
        # "A red car" and "I think" hold words, not letters of options.
        if match[1] not in "AI" or _AFTER_LETTER.match(text, match.end()):
            letters.add(match[1])
    return {letter.upper() for letter in letters}


def _plain(text: str) -> str:
    """``text`` without compatibility forms, LaTeX wrappers and decoration around it."""
    plain = unicodedata.normalize("NFKC", text)
    return _WRAPPERS.sub(r"\1", plain).strip(_DECORATION)


def _same(left: str, right: str) -> bool:
    """Whether two texts are the same but for case, spacing and a closing full stop."""
    return _folded(left) == _folded(right)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").strip()
