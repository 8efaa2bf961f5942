"""What is asked and what is right, as records have it: texts without marks and instructions, answers by their kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data_pipelines.engine.fields import unusable
from data_pipelines.engine.options import check_letters, letter_and_text, letter_of, split_options
from vlm_pg.answers.options import same_text
from vlm_pg.data.gold import answers_in
from vlm_pg.data.option_letters import close_gap, have_letters
from vlm_pg.types import MEDIA_MARKS

_MARKS = tuple(MEDIA_MARKS.values())
_OPENS, _CLOSES = "<answer>", "</answer>"
_TAG = re.compile(r"</?answer>")
_COUNT = re.compile(r"0|[1-9][0-9]{0,8}")


def without_sentences(text: str, sentences: Sequence[str]) -> str:
    """The text without these sentences at its start and end, in any order, and without space around it.

    without_sentences("<image>\\nHow many?\\nAnswer briefly.", ["<image>", "Answer briefly."]) == "How many?"
    """
    text, before = text.strip(), None
    while text != before:
        before = text
        for sentence in sentences:
            text = text.removeprefix(sentence).removesuffix(sentence).strip()
    return text


def check_removed_marks(text: str, kept: str, media: int) -> None:
    """Refuse a question from which marks are removed, unless there is one for each medium, of whatever kind: sets of
    videos are published with "<image>".

    Args:
        text, kept: the question as published, and what is left of it.
        media: how many images and videos the record names.

    Raises:
        SampleError: ``media_mark_without_medium``.
    """
    removed = sum(text.count(mark) - kept.count(mark) for mark in _MARKS)
    if removed and removed != media:
        came = (
            f"{removed} mark(s) ({' or '.join(_MARKS)}) are removed from the question, and the row names {media} media"
        )
        allowed = "One mark for each medium before or after the question, or marks that are not removed,"
        raise unusable("media_mark_without_medium", came, allowed)


def without_mark(text: str) -> str:
    """The text without the mark, "<image>" or "<video>", that says at its start or end where the medium goes.

    Raises:
        SampleError: ``media_token_in_text``: another stands in it.
    """
    text = text.strip()
    for mark in _MARKS:
        if text.startswith(mark) or text.endswith(mark):
            text = text.removeprefix(mark) if text.startswith(mark) else text.removesuffix(mark)
            break
    left = next((mark for mark in _MARKS if mark in text), None)
    if left is not None:
        came = f"the question holds '{left}' amid its text, or again"
        raise unusable("media_token_in_text", came, "One such mark, before or after the question,")
    return text.strip()


def untagged(solution: str) -> str:
    """What stands between answer tags in a text: untagged("So <answer>B</answer>") == "B".

    Raises:
        SampleError: ``no_answer_tag``: there are none, or not in pairs; ``ambiguous_answer``: they do not say the same.
    """
    found = answers_in(solution)
    if not found or {solution.count(_OPENS), solution.count(_CLOSES)} != {len(found)}:
        raise unusable("no_answer_tag", f"the answer is '{solution[:80]}'", f"One answer as {_OPENS}it{_CLOSES}")
    if len(set(found)) > 1:
        raise unusable("ambiguous_answer", f"the answers are {found[:4]}", "One right answer")
    return found[0]


def untagged_once(text: str) -> str:
    """A gold answer without the tags around it, which it may lack: untagged_once("<answer>B</answer>") == "B".

    Raises:
        SampleError: ``no_answer_tag``: there are other tags, or text beside them.
    """
    inner = text.strip()
    if inner.startswith(_OPENS) and inner.endswith(_CLOSES):
        inner = inner[len(_OPENS) : -len(_CLOSES)]
    if _TAG.search(inner):
        raise unusable("no_answer_tag", f"the answer is '{text[:80]}'", f"One answer, or {_OPENS}it{_CLOSES},")
    return inner.strip()


def answered(kind: str, gold: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a record that say which answer is right and how it is checked.

    answered("numerical", "3") == {"problem_type": "numerical", "options": [], "solution": "<answer>3</answer>"}

    Raises:
        SampleError: ``no_answer_tag``: the answer holds such tags itself.
    """
    if _TAG.search(gold):
        raise unusable("no_answer_tag", f"the answer '{gold[:80]}' holds tags", "An answer without")
    return {"problem_type": kind, "options": list(options), "solution": f"{_OPENS}{gold.strip()}{_CLOSES}"}


def open_or_choice(text: str, gold: str) -> dict[str, Any]:
    """The fields of a record that a question, its options as lines below it, and a gold answer in any spelling make.

    open_or_choice("Which?\\nA. red\\nB. blue", "B. Blue.")["solution"] == "<answer>B</answer>". Without options a
    question is open, and of the kind that checks its answer best.

    Raises:
        SampleError: as ``split_options``, ``letter_of`` and ``answered``; ``too_few_options``: the answer is a letter,
            and there are none.
    """
    question, options = split_options(text, gap=True)
    if closed := close_gap(options, gold, same_text):
        return {"problem": question, **answered("multiple choice", closed.letter, closed.options)}
    if options:
        check_letters(options)
        # Of lines it is sure that they begin with their letters; in records a few in another order would not be.
        ordered = options if have_letters(options) else sorted(options)
        return {"problem": question, **answered("multiple choice", letter_of(gold, options), ordered)}
    return {"problem": question, **_open(gold)}


def _open(gold: str) -> dict[str, Any]:
    """Yes/no or numerical where the answer is just that, else free-form: by overlap "not 3" would earn a part of 3."""
    bare = gold.strip().removesuffix(".").strip()
    if bare.lower() in ("yes", "no"):
        return answered("yes/no", bare.lower())
    if _COUNT.fullmatch(bare):
        return answered("numerical", bare)
    if letter_and_text(gold)[0]:
        raise unusable("too_few_options", f"the answer is '{gold[:80]}', and the question has no options", "Options")
    return answered("free-form", gold)
