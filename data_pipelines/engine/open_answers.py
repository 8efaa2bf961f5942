"""Answers that are not chosen among options: by which of the kinds of answer each is best checked."""

from __future__ import annotations

import re
from typing import Any

from data_pipelines.engine.questions import answered

# Numbers are compared after rounding to two decimals: those of more, and fractions, as mathematics is.
_NUMBER = re.compile(r"-?(?:[0-9]{1,9}|[0-9]{1,3}(?:,[0-9]{3}){1,3})(?:\.[0-9]{1,2})?")
_MATHEMATICS = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{3,9}|/[0-9]{1,9})")


def open_answer(gold: str) -> dict[str, Any]:
    """The fields of a record that say which answer is right and how it is checked, of a set's open questions.

    "Yes" and "No" are yes/no answers, a whole number and one of at most two decimals numerical, one of more decimals
    and a fraction mathematics; of others the answer must be the same but for how it is written. They are names, short
    texts and quantities with units, to which an overlap of words is no measure: "48 g/mol" is no half of "84 g/mol".
    open_answer("1.06")["problem_type"] == "numerical"

    Raises:
        SampleError: as ``answered``.
    """
    gold = gold.strip()
    if gold.lower() in ("yes", "no"):
        return answered("yes/no", gold.lower())
    kinds = {"numerical": _NUMBER, "mathematics": _MATHEMATICS}
    return answered(next((kind for kind, pattern in kinds.items() if pattern.fullmatch(gold)), "exact"), gold)
