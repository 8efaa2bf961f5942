"""Two runs on the same questions: the difference, question by question, and how far it may be off.

Runs are better or worse at the same questions, so the error of the paired differences is smaller than that of two
means (Miller, "Adding Error Bars to Evals", arXiv 2411.00640). It is clustered as that of a mean (``estimates.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.errors import VlmPgError
from vlm_pg.eval.answer_files import file_name, read_answers
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.estimates import UNLIMITED, Figure, mean, mean_of
from vlm_pg.eval.folder import RESULT
from vlm_pg.eval.measures import Value, score_of

_NAMED = 5


@dataclass(frozen=True)
class Comparison:
    """Of a second run with a first one, over the questions that both have a score of.

    ``difference``: second minus first, with its clustered standard error and 95 % interval. ``first`` and ``second``:
    their means over those questions. ``n_better``, ``n_worse``, ``n_equal``: questions at which the second is.
    ``n_only_first``, ``n_only_second``: questions that are in one run alone; ``n_unscored``: that are in both and
    lack a score in one.
    """

    difference: Figure
    first: float
    second: float
    n_better: int
    n_worse: int
    n_equal: int
    n_only_first: int
    n_only_second: int
    n_unscored: int

    def to_row(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = ("better", "worse", "equal", "only_first", "only_second", "unscored")
        return {
            "difference": self.difference.to_row(),
            "first": self.first,
            "second": self.second,
            **{f"n_{name}": getattr(self, f"n_{name}") for name in counts},
        }


def compare(first: Sequence[Answered], second: Sequence[Answered], value: Value = score_of) -> Comparison:
    """The paired comparison of two runs; questions are paired by their ids.

    Args:
        value: of a question in one run; None where it has none.

    Raises:
        VlmPgError: no question has a value in both runs; one id is two different questions, or is twice in one run.
    """
    left, right = _by_id(first, "first"), _by_id(second, "second")
    shared = [name for name in left if name in right]
    other = [name for name in shared if _asked(left[name]) != _asked(right[name])]
    if other:
        raise VlmPgError(
            f"{len(other)} of {len(shared)} shared ids are different questions, options or gold answers in the two "
            f"runs: {_list(other)}. Runs on the same records can be compared; evaluate both on one version of the set."
        )
    pairs = [(name, value(left[name]), value(right[name])) for name in shared]
    scored = [(name, before, after) for name, before, after in pairs if before is not None and after is not None]
    differences = [(left[name].cluster, after - before) for name, before, after in scored]
    estimate = mean_of(differences, (-1.0, 1.0) if value is score_of else UNLIMITED)
    if estimate is None:
        raise VlmPgError(
            f"The two runs share {len(shared)} questions, and none has a score in both (the first has {len(left)} "
            f"questions: {_list(left)}; the second {len(right)}: {_list(right)}). Give runs on the same set."
        )
    return Comparison(
        difference=estimate.figure(),
        first=mean(before for _, before, _ in scored) or 0.0,
        second=mean(after for _, _, after in scored) or 0.0,
        n_better=sum(after > before for _, before, after in scored),
        n_worse=sum(after < before for _, before, after in scored),
        n_equal=sum(after == before for _, before, after in scored),
        n_only_first=len(left) - len(shared),
        n_only_second=len(right) - len(shared),
        n_unscored=len(shared) - len(scored),
    )


def comparison_lines(folder: Path, others: Sequence[Path]) -> list[str]:
    """Lines for the console: the evaluation in ``folder`` against each other one, for the sets that both have.

    Raises:
        VlmPgError: as ``compare``.
    """
    lines = []
    for other in others:
        mine, theirs = ({path.name for path in one.glob("answers_*.jsonl")} for one in (folder, other))
        if not mine & theirs:
            sets = [", ".join(sorted(name[8:-6] for name in names)) or "none" for names in (mine, theirs)]
            lines.append(f"{other.name}: no set to compare; here are {sets[0]}, there {sets[1]}")
        for path in sorted(folder.glob("answers_*.jsonl")):
            twin = other / path.name
            if not twin.is_file():
                continue
            found = compare(read_answers(twin), read_answers(path))
            reach = found.difference.interval
            shown = "" if reach is None else f", 95 % interval {reach[0]:+.3f} to {reach[1]:+.3f}"
            if reach is None and found.difference.standard_error is not None:
                shown = ", no interval since all questions differ alike"
            lines.append(
                f"{path.stem.removeprefix('answers_')}: {found.second:.3f}, {found.second - found.first:+.3f} against "
                f"{other.name}{shown} ({found.difference.n} questions; better at {found.n_better}, worse at "
                f"{found.n_worse})"
            )
            name = path.stem.removeprefix("answers_")
            here, there = _reader_in(folder, name), _reader_in(other, name)
            if here != there:
                lines.append(f"{name}: not alike: read by {here} here, by {there} there")
    return lines


def _reader_in(folder: Path, file_stem: str) -> str:
    """Who read the answers of a set, named as its file is; "nobody named" where no result says so."""
    try:
        sets = json.loads((folder / RESULT).read_text())["sets"]
    except (OSError, ValueError, KeyError):
        return "nobody named"
    readers = {file_name(name): figures.get("reader") for name, figures in sets.items()}
    return readers.get(file_stem) or "nobody named"


def _by_id(answered: Sequence[Answered], which: str) -> Mapping[str, Answered]:
    result: dict[str, Answered] = {}
    for question in answered:
        if question.sample_id in result:
            raise VlmPgError(
                f"Question {question.sample_id!r} is twice in the {which} run. Each question may come once, with all "
                "of its outputs; remove the others."
            )
        result[question.sample_id] = question
    return result


def _asked(question: Answered) -> tuple[str, tuple[str, ...], str]:
    return question.question, question.options, question.gold


def _list(names: Sequence[str] | Mapping[str, Answered]) -> str:
    some = [repr(name) for name in list(names)[:_NAMED]]
    return ", ".join([*some, "..."] if len(names) > _NAMED else some) or "none"
