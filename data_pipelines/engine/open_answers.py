"""Answers that are not chosen among options: by which of the kinds of answer each is best checked."""

from __future__ import annotations

import re
from typing import Any

from data_pipelines.engine.questions import answered

# Numbers are compared after rounding to two decimals: those of more, and fractions, as mathematics is.
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,2})?")
_MATHEMATICS = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{3,9}|/[0-9]{1,9})")
_LETTER = re.compile(r"[A-Za-z]")


def open_answer(gold: str) -> dict[str, Any]:
    """The fields of a record that say which answer is right and how it is checked, of a set's open questions.

    "Yes" and "No" are yes/no answers, a whole number and one of at most two decimals numerical, one of more decimals
    and a fraction mathematics, a single letter (of a point in a picture, say) must be that letter; others are
    free-form. open_answer("1.06")["problem_type"] == "numerical"

    Raises:
        SampleError: as ``answered``.
    """
    gold = gold.strip()
    if gold.lower() in ("yes", "no"):
        return answered("yes/no", gold.lower())
    kinds = {"numerical": _NUMBER, "mathematics": _MATHEMATICS, "exact": _LETTER}
    return answered(next((kind for kind, pattern in kinds.items() if pattern.fullmatch(gold)), "free-form"), gold)
