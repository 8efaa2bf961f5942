"""Language: the share of letters in the wanted language's script."""

from __future__ import annotations

import unicodedata
from collections import Counter

from vlm_pg.rewards.format import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN
from vlm_pg.rewards.settings import LanguageSettings

_HAN = ("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH", "IDEOGRAPHIC")
# How the Unicode names of a script's letters begin.
_NAMES: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN",),
    "han": _HAN,
    "japanese": ("HIRAGANA", "KATAKANA", *_HAN),
    "hangul": ("HANGUL",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",),
}


def language_reward(text: str, settings: LanguageSettings) -> float:
    """Letters of ``script`` divided by all letters of the response, its tags left out.

    1.0 without any letter: nothing is in another script, and a number is right in every language.
    """
    for tag in (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE):
        text = text.replace(tag, " ")
    letters = {
        letter: count for letter, count in Counter(unicodedata.normalize("NFKC", text)).items() if letter.isalpha()
    }
    if not letters:
        return 1.0
    wanted = _NAMES[settings.script]
    in_script = sum(count for letter, count in letters.items() if unicodedata.name(letter, "").startswith(wanted))
    return in_script / sum(letters.values())
