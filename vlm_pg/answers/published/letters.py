"""Rules that take the first capital letter of an option, wherever it stands in the output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlm_pg.answers.published.rule import chosen, drawn
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

# As the published list has them: two commas are missing in it, so that four of its entries are two long texts, which no
# output contains.
VIDEO_MME_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
)
LONGVIDEOBENCH_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option is",
    "The correct option is",
    "Best answer:",
    "Best option:",
)


def first_letter(output: str, prefixes: Sequence[str], allowed: str) -> str:
    """The first of the letters ``allowed`` anywhere in the output without these texts; "" without any.

    first_letter("Based on the video, the answer is A", VIDEO_MME_PREFIXES, "ABCD") == "B"
    """
    for prefix in prefixes:
        output = output.replace(prefix, "")
    found = re.search(f"[{allowed}]", output)
    return found[0] if found else ""


def first_of_four(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The first of A to D; an output without any is left out of the denominator."""
    letter = first_letter(output, VIDEO_MME_PREFIXES, "ABCD")
    if not letter:
        return Reading(None, 0.0, "the rule reads no answer and leaves the output out", counts=False)
    return chosen(sample, letter)


def first_of_five_or_drawn(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The first of A to E; of an output without any, an option is drawn."""
    letter = first_letter(output, LONGVIDEOBENCH_PREFIXES, "ABCDE")
    return chosen(sample, letter) if letter else drawn("longvideobench/lmms", sample, output)
