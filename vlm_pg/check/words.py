"""What shows in the words of a record alone: options that read alike, marks that stand for media."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from vlm_pg.check.finding import Finding, error, warning
from vlm_pg.errors import SampleError
from vlm_pg.rewards.options import choices_of, folded
from vlm_pg.types import Sample, right_letters

# What other formats write where a medium is meant; ours names media beside the question.
MARKS = {"image": "<image>", "video": "<video>"}
_NO_MEDIUM = "media_mark_without_medium"
_WITH_OPTIONS = ("multiple_choice", "multiple_select")


def word_findings(sample: Sample) -> Iterator[Finding]:
    """Everything of this file, about one sample."""
    yield from _equal_options(sample)
    yield from _marks(sample)


def _equal_options(sample: Sample) -> Iterator[Finding]:
    """Options of equal text, as the reward compares texts (``rewards/options.py: same_text``)."""
    if sample.answer_kind not in _WITH_OPTIONS:
        return
    letters: defaultdict[str, list[str]] = defaultdict(list)
    for letter, text in choices_of(sample):
        letters[folded(text)].append(letter)
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


def _marks(sample: Sample) -> Iterator[Finding]:
    """Marks of media in the text are read as words; where they are not as many as the media, some are missing."""
    text = "\n".join((sample.question, *sample.options))
    for kind, mark in MARKS.items():
        marks, media = text.count(mark), sum(ref.kind == kind for ref in sample.media)
        if not marks:
            continue
        came = f"the text has '{mark}' {marks} time(s), and the record names {media} {kind}(s)"
        if marks == media:
            message = f"{came}. Media come before the question, and the mark is read as words. Remove it from the text."
            yield warning(sample, "media_mark_in_text", message)
            continue
        fault = f"{came}. Each medium that is meant must be in 'path'. Correct 'path', or remove the marks."
        if sample.media:
            yield error(sample, SampleError(_NO_MEDIUM, fault))
        else:  # it may be a question about a language that has such tags
            yield warning(sample, _NO_MEDIUM, f"{fault} A question about the words themselves may keep them.")
