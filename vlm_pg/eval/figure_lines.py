"""Console lines: figures of sets, and paired comparisons of two evaluations.

Runs are better or worse at the same questions, so the error of the paired differences is smaller than that of two
means (Miller, "Adding Error Bars to Evals", arXiv 2411.00640). It is clustered as that of a mean (``measures.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.errors import VlmPgError
from vlm_pg.eval.answer_files import RESULT, file_name, read_answers
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.measures import Figure, mean, mean_of

_MAX_NAMES = 5


def table(results: dict[str, Any]) -> list[str]:
    """One line per set, its categories and remarks on its figures indented."""
    lines = []
    for name, figures in results["sets"].items():
        lines.append(_line(name, figures))
        for key, one in figures.get("figures", {}).items():
            if key != figures.get("main"):
                value = "none"
                if one["value"] is not None:
                    unit = " %" if one["unit"] == "percent" else ""
                    value = f"{one['value']:.3f}{_error(one)}{unit} (n {one['n']})"
                lines.append(f"    {key}: {value}")
        if "judged" in figures:
            lines.append(f"    {_judged(figures['judged'])}")
        if len(figures["by_category"]) > 1:
            lines += [f"    {_line(category, part)}" for category, part in figures["by_category"].items()]
        lines += [f"    note: {note}" for note in figures.get("notes", ())]
    return lines


def _error(figure: dict[str, Any]) -> str:
    return "" if figure.get("standard_error") is None else f" ± {figure['standard_error']:.3f}"


def _counts(figures: dict[str, Any], words: Mapping[str, str]) -> str:
    return "".join(f", {figures[key]} {text}" for key, text in words.items() if figures.get(key))


def _line(name: str, figures: dict[str, Any]) -> str:
    if figures["accuracy"] is None:
        return f"{name}: no question could be scored"
    text = f"{name}: accuracy {figures['accuracy']:.3f}{_error(figures)} (n {figures['n']}"
    for key, label in (("chance", "chance"), ("format_rate", "format")):
        if figures.get(key) is not None:
            text += f", {label} {figures[key]:.2f}"
    words = {
        "n_no_value": "without a value",
        "n_bad_media": "with bad media",
        "n_no_output": "without an output",
        "n_unparsed": "outputs unparsed",
        "n_truncated": "outputs truncated",
        "n_left_out": "outputs left out by the rule",
    }
    text += _counts(figures, words)
    for key, label in (("pass_at_k", "pass"), ("majority_at_k", "majority")):
        values = figures.get(key, {})
        text += "".join(f", {label}@{k} {value:.3f}" for k, value in values.items() if k != "1" and value is not None)
    return text + ")"


def _judged(figures: dict[str, Any]) -> str:
    accuracy = "no accuracy" if figures["accuracy"] is None else f"accuracy {figures['accuracy']:.3f}{_error(figures)}"
    words = {
        "n_valued": "scored that had no value",
        "n_undecided": "undecided",
        "n_unreached": "of them without a reply",
    }
    return (
        f"with the judge {figures['model'] or '(not reached)'}: {accuracy} (n {figures['n']}, asked about "
        f"{figures['n_asked']} outputs, {figures['n_raised']} raised, {figures['n_lowered']} lowered"
        f"{_counts(figures, words)})"
    )


@dataclass(frozen=True)
class Comparison:
    """A second run against a first one, over the questions that have a score in both.

    ``difference``: second minus first, with its clustered standard error and 95 % interval. ``first`` and ``second``:
    their means over those questions. ``n_better``, ``n_worse``: questions at which the second is.
    """

    difference: Figure
    first: float
    second: float
    n_better: int
    n_worse: int


def compare(first: Sequence[Answered], second: Sequence[Answered]) -> Comparison:
    """The paired comparison of two runs; questions are paired by their ids.

    Raises:
        VlmPgError: no question has a score in both runs; one id is two different questions, or is twice in one run.
    """
    left, right = _by_id(first, "first"), _by_id(second, "second")
    shared = [name for name in left if name in right]
    fields = ("question", "options", "gold")
    other = [name for name in shared if any(getattr(left[name], key) != getattr(right[name], key) for key in fields)]
    if other:
        raise VlmPgError(
            f"{len(other)} of {len(shared)} shared ids are different questions, options or gold answers in the two "
            f"runs: {_list(other)}. Runs on the same records can be compared; evaluate both on one version of the set."
        )
    pairs = [(left[name].cluster, left[name].score, right[name].score) for name in shared]
    scored = [(cluster, before, after) for cluster, before, after in pairs if before is not None and after is not None]
    estimate = mean_of([(cluster, after - before) for cluster, before, after in scored], (-1.0, 1.0))
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
    )


def comparison_lines(folder: Path, others: Sequence[Path]) -> list[str]:
    """The evaluation in ``folder`` against each other one, for the sets that both have.

    Raises:
        VlmPgError: as ``compare``.
    """
    lines = []
    for other in others:
        names, other_names = ({path.name[8:-6] for path in one.glob("answers_*.jsonl")} for one in (folder, other))
        if not names & other_names:
            sets = [", ".join(sorted(each)) or "none" for each in (names, other_names)]
            lines.append(f"{other.name}: no set to compare; here are {sets[0]}, there {sets[1]}")
        for name in sorted(names & other_names, key=lambda name: f"answers_{name}.jsonl"):
            found = compare(*(read_answers(one / f"answers_{name}.jsonl") for one in (other, folder)))
            interval = found.difference.interval
            shown = "" if interval is None else f", 95 % interval {interval[0]:+.3f} to {interval[1]:+.3f}"
            if interval is None and found.difference.standard_error is not None:
                shown = ", no interval since all questions differ alike"
            lines.append(
                f"{name}: {found.second:.3f}, {found.second - found.first:+.3f} against {other.name}{shown} "
                f"({found.difference.n} questions; better at {found.n_better}, worse at {found.n_worse})"
            )
            here, there = _reader_in(folder, name), _reader_in(other, name)
            if here != there:
                lines.append(f"{name}: not alike: read by {here} here, by {there} there")
    return lines


def _reader_in(folder: Path, file_stem: str) -> str:
    """The reader of a set, named as its file is, by the folder's result."""
    unknown = "an unknown reader"
    try:
        sets = json.loads((folder / RESULT).read_text())["sets"]
    except (OSError, ValueError, KeyError):
        return unknown
    readers = {file_name(name): figures.get("reader") for name, figures in sets.items()}
    return readers.get(file_stem) or unknown


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


def _list(names: Iterable[str]) -> str:
    quoted = list(map(repr, names))
    return ", ".join(quoted[:_MAX_NAMES] + ["..."] * (len(quoted) > _MAX_NAMES)) or "none"
