"""Parts of a reward that a response's text and length decide, its answer block, and how parts add up.

Tags are found by plain string searches, no regular expressions: the text comes from the model, may be long and may be
hostile, and every function here takes time linear in its length.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from vlm_pg.answers.plain_text import words
from vlm_pg.answers.verdict import Verdict
from vlm_pg.rewards.settings import LanguageSettings, LengthSettings, RepetitionSettings, RewardSettings
from vlm_pg.types import Sample

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)


@dataclass(frozen=True)
class Response:
    """One response to one question. ``text``: as the model wrote it, without special tokens.

    ``num_tokens``: its length in tokens, end token included; None where they were not counted.
    """

    sample: Sample
    text: str
    num_tokens: int | None = None


def format_reward(text: str) -> float:
    """1.0 if ``text`` is exactly one think block, then one answer block, and nothing else; otherwise 0.0.

    White space around and between the blocks is allowed. A tag that occurs twice, or inside the other block, is not.

        format_reward("<think>first red</think> <answer>B</answer>") -> 1.0
    """
    stripped = text.strip()
    occur_once = all(stripped.count(tag) == 1 for tag in TAGS)
    if not (occur_once and stripped.startswith(THINK_OPEN) and stripped.endswith(ANSWER_CLOSE)):
        return 0.0
    think_end = stripped.index(THINK_CLOSE) + len(THINK_CLOSE)
    answer_start = stripped.index(ANSWER_OPEN)
    # A negative gap means that the answer opens inside the think block.
    blocks_in_order = think_end <= answer_start and not stripped[think_end:answer_start].strip()
    return 1.0 if blocks_in_order else 0.0


def extract_answer(text: str) -> str | None:
    """The text of the last complete ``<answer>`` element outside of all think blocks, stripped; None if there is none.

    A think block that never closes reaches to the end, unless the text ends in an answer element: then only its closing
    tag was left out. One that closes without opening begins with the text (some prompts open it).

    extract_answer("<think><answer>A</answer></think><answer> B </answer>") -> "B"
    extract_answer("the answer is B") -> None
    """
    outside = _outside_of_thoughts(text)
    answer, start = None, outside.find(ANSWER_OPEN)
    while start >= 0:
        end = outside.find(ANSWER_CLOSE, start)
        if end < 0:
            break
        # An element that opens again before it closes begins where it opens last.
        start = outside.rfind(ANSWER_OPEN, start, end) + len(ANSWER_OPEN)
        answer = outside[start:end].strip()
        start = outside.find(ANSWER_OPEN, end)
    return answer


def _outside_of_thoughts(text: str) -> str:
    """``text`` without its think blocks; a space is left where one was."""
    parts: list[str] = []
    start = 0
    while True:
        closing = text.find(THINK_CLOSE, start)
        # Searched up to the closing tag only, so that no part of the text is looked at twice.
        opening = text.find(THINK_OPEN, start, len(text) if closing < 0 else closing)
        if opening >= 0:
            parts.append(text[start:opening])
        elif closing < 0:
            return " ".join([*parts, text[start:]])
        else:
            parts = []  # it was a thought from the beginning
        if closing < 0:
            ends_in_answer = text.rstrip().endswith(ANSWER_CLOSE)
            return " ".join([*parts, text[opening:]] if ends_in_answer else parts)
        start = closing + len(THINK_CLOSE)


@dataclass(frozen=True)
class ReadAnswer:
    """The answer of one response, for a checker.

    ``text`` is empty where there is no answer; ``fault`` is the reason, and makes the answer wrong. The checker runs
    nevertheless: whether a reward has a value must depend on the sample only, or the valued rollouts of a group would
    be a biased selection.
    """

    text: str
    fault: str = ""

    def judged(self, verdict: Verdict) -> Verdict:
        """The checker's verdict, or 0 with the fault."""
        return Verdict(0.0, self.fault) if self.fault and verdict.value is not None else verdict


def read_answer(text: str, settings: RewardSettings) -> ReadAnswer:
    """The answer block of a response, of at most ``max_answer_characters``."""
    answer = extract_answer(text)
    if answer is None:
        return ReadAnswer("", "no <answer> block")
    if len(answer) > settings.max_answer_characters:
        return ReadAnswer(
            "",
            f"answer has {len(answer)} characters, more than the {settings.max_answer_characters} that are read "
            "(reward.max_answer_characters)",
        )
    return ReadAnswer(answer, "" if answer else "empty answer")


def length_reward(num_tokens: int, settings: LengthSettings) -> float:
    """1.0 from ``min_tokens`` to ``max_tokens``; below n / min_tokens; above 2 - n / max_tokens, at least 0."""
    if num_tokens < settings.min_tokens:
        return num_tokens / settings.min_tokens
    if num_tokens > settings.max_tokens:
        return max(0.0, 2.0 - num_tokens / settings.max_tokens)
    return 1.0


def repetition_reward(text: str, settings: RepetitionSettings) -> float:
    """Number of different n-grams divided by the number of all: 1.0 without repetition, near 0 for a loop.

    Words are what white space separates, without case; characters of scripts without spaces are words of their own.
    A text of fewer than ``ngram`` words repeats nothing.
    """
    found = words(text.casefold())
    num_ngrams = len(found) - settings.ngram + 1
    if num_ngrams < 1:
        return 1.0
    return len({tuple(found[start : start + settings.ngram]) for start in range(num_ngrams)}) / num_ngrams


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
    for tag in TAGS:
        text = text.replace(tag, " ")
    letters = [sign for sign in unicodedata.normalize("NFKC", text) if sign.isalpha()]
    if not letters:
        return 1.0
    wanted = _NAMES[settings.script]
    return sum(unicodedata.name(letter, "").startswith(wanted) for letter in letters) / len(letters)


def total_reward(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Sum of weight times part over the parts whose weight is not 0; None if one of these has no value."""
    total = 0.0
    for name, weight in weights.items():
        if weight == 0.0:
            continue
        value = parts[name]
        if value is None:
            return None
        total += weight * value
    return total
