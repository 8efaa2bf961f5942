"""Options of one record that read alike, as the reward compares them."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_pg.answers.options import choices_of, same_text
from vlm_pg.check.finding import Finding, error, warning
from vlm_pg.errors import SampleError
from vlm_pg.types import Sample, right_letters

_WITH_OPTIONS = ("multiple_choice", "multiple_select")


def word_findings(sample: Sample) -> Iterator[Finding]:
    """Options of equal text, as the reward compares texts (``rewards/options.py: same_text``)."""
    if sample.answer_kind not in _WITH_OPTIONS:
        return
    letters: dict[str, list[str]] = {}
    for letter, text in choices_of(sample):
        first = next((other for other in letters if same_text(text, other)), text)
        letters.setdefault(first, []).append(letter)
    right = right_letters(sample.answer)
    for text, equal in letters.items():
        if len(equal) < 2:
            continue
        came = f"the options {', '.join(equal)} have one text as rewards read it, '{text[:80]}'"
        if right & set(equal):
            yield error(
                sample,
                SampleError(
                    "equal_options",
                    f"{came}, and {', '.join(sorted(right & set(equal)))} is right. An answer in words could not be "
                    "told from a wrong one. Correct 'options', or remove the record.",
                ),
            )
        else:
            yield warning(
                sample,
                "equal_wrong_options",
                f"{came}. Neither is right, so that fewer options are left to choose from. Correct 'options'.",
            )
