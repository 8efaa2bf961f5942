"""Multiple choice: which letter an answer names."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict, shorten
from vlm_pg.types import Sample

# "B.", "(B)", "b) red", "B: red", "b - red", or nothing but the letter.
_LABEL = re.compile(
    r"[(\[]?([A-Za-z])(?:[.:][)\]]?|[)\]][.:]?|\s{0,3}[-\u2013\u2014](?=\s))(.*)|[(\[]?([A-Za-z])[)\]]?$", re.DOTALL
)
_SPELLED_OUT = re.compile(r"(?<!\w)[(\[]?([A-Za-z])(?:[)\]][.:]?|[.:,]|\s{0,3}[-\u2013\u2014])\s{0,3}(?=\S)")
_NAMED = re.compile(
    r"\b(?:option|choice|letter)(?:\s{1,3}is\b:?|\s{0,3}:)?\s{0,3}\(?\b([A-Za-z])\b(?!['’])", re.IGNORECASE
)
_BRACKETED = re.compile(r"\(([A-Za-z])\)|(?<![\w(])([A-Za-z])\)")
_STATED = re.compile(
    r"\b(?:(?:answer|it)(?:\s{1,3}is\b:?|\s{0,3}:)|answer|choose|pick|select|go with)\s{0,3}\b([A-Za-z])"
    r"(?=\s{0,3}(?:[.,;:!]|$|(?:because|since)\b))",
    re.IGNORECASE,
)
_CAPITAL = re.compile(r"(?<![\w'’-])([A-Z])(?![\w'’]|-[a-z])")
# A capital A before one of these, or before no word on its line, is a letter; before any other word it is the article.
_AFTER_LETTER = re.compile(r"[^\S\n]*(?:$|\n|[^\w\s]|(?:or|and|is|was|because|since|as|but|not|then)\b)")
# What may stand before an option's text: "The correct answer is red", "I choose red".
_LEAD_IN = re.compile(
    r"(?:(?:the|my)\s{1,3})?(?:(?:correct|right|best|final)\s{1,3})?(?:answer|option|choice)(?:\s{1,3}is\b:?|\s{0,3}:)"
    r"|i\s{1,3}(?:choose|pick|select)\b:?",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"\*\*|`")
_DECORATION = "*_`\"'“”‘’$ \t\r\n"
_WRAPPERS = re.compile(r"\\(?:boxed|text|mathrm|textbf)\s?\{([^{}]{0,400})\}")
_MOST_NESTED_WRAPPERS = 3


def check_multiple_choice(answer: str, sample: Sample, settings: RewardSettings) -> Verdict:
    """1.0 if ``answer`` names the gold option and no other, else 0.0.

    Understood: "B", "b", "B.", "(B)", "b)", "Option B", "B. red", "b - red", "\\boxed{B}", "The answer is B", and the
    text of the option, alone or after "The answer is". Two different letters are wrong, even if one of them is right.
    The gold answer may be spelled in the same ways.
    """
    gold = named_letters(sample.answer, sample.options)
    if len(gold) != 1:
        return Verdict(None, f"gold answer {shorten(sample.answer)} does not name one option")
    if sample.options and not gold <= dict(_plain_choices(sample.options)).keys():
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
    """The letters (upper case) of all options that ``text`` names, by letter or by the option's whole text.

    A single letter is a letter, also where the text of another option is that letter.
    """
    choices = _plain_choices(tuple(options))
    sentence = _plain(text)
    lead_in = _LEAD_IN.match(sentence)
    # "The answer is red" says no more than "red".
    short = _plain(sentence[lead_in.end() :]) if lead_in else sentence
    is_letter = len(short) == 1 and short.isascii() and short.isalpha()
    if is_letter and (not choices or short.upper() in dict(choices)):
        return {short.upper()}
    by_text = {letter for letter, option in choices if option and _same(short, option)}
    if by_text := by_text or {letter for letter, option in choices if _same(short, f"{letter} {option}")}:
        return by_text
    in_sentence = _letters_in_sentence(_without_texts(sentence, choices))
    label = _LABEL.match(short)
    if label is None:
        return in_sentence
    letter = (label[1] or label[3]).upper()
    rest = _plain(label[2] or "")
    same_as_rest = {own for own, option in choices if rest and _same(rest, option)}
    return {letter} if letter in same_as_rest else {letter} | same_as_rest | in_sentence


@lru_cache(maxsize=1024)
def _plain_choices(options: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Remembered, since all responses to a question are read with its options."""
    return tuple((letter, _plain(option)) for letter, option in split_options(options))


def _without_texts(text: str, choices: Sequence[tuple[str, str]]) -> str:
    """``text`` with each letter that its option's text follows in brackets, and that text gone, since it may hold other
    letters: "D. Vitamin C, because" -> "(D), because"."""
    options = dict(choices)
    parts, end = [], 0
    for label in _SPELLED_OUT.finditer(text):
        option = options.get(label[1].upper())
        after = label.end() + len(option or "")
        spelled_out = option and _same(text[label.end() : after], option) and not text[after : after + 1].isalnum()
        if spelled_out and label.start() >= end:
            parts += [text[end : label.start()], f"({label[1]})"]
            end = after
    return "".join(parts) + text[end:]


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
    """``text`` without compatibility forms, LaTeX wrappers and emphasis or quotes around it."""
    plain = unicodedata.normalize("NFKC", text)
    for _ in range(_MOST_NESTED_WRAPPERS):
        plain = _WRAPPERS.sub(r"\1", plain)
    return _EMPHASIS.sub("", plain).strip(_DECORATION)


def _same(left: str, right: str) -> bool:
    """Whether two texts are the same but for case, spacing and a closing full stop."""
    return _folded(left) == _folded(right)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").strip()
