"""What is measured of every evaluation set: accuracy, pass@k, majority@k, lengths of outputs, and what is missing.

Outputs that a published rule leaves out of its denominator are in no figure, and counted. Outputs whose question has no
value (its gold answer cannot be used) are in no figure either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from vlm_pg.eval.contracts import Answered, Output
from vlm_pg.eval.estimates import SCORES, UNLIMITED, Figure, Limits, Unit, Valued, mean, mean_of
from vlm_pg.eval.majority import majority_at_k

# The reason (``Answered.fault``) of a question that nobody answered, where outputs were made elsewhere.
NO_OUTPUT = "no_output"
Value = Callable[[Answered], float | None]


def score_of(question: Answered) -> float | None:
    """The mean score of a question's outputs."""
    return question.score


@dataclass(frozen=True)
class Counts:
    """What the figures stand on.

    Questions: ``n_total`` = ``n_scored`` + ``n_bad_media`` (media or prompt could not be used) + ``n_no_output``
    (nobody answered) + ``n_no_value`` (answered, and no output has a value that counts).
    Outputs: ``n_outputs`` in all; ``n_unparsed`` give no answer, ``n_truncated`` were cut off by the length limit,
    ``n_left_out`` do not count by the set's rule.
    """

    n_total: int
    n_scored: int
    n_bad_media: int
    n_no_output: int
    n_no_value: int
    n_outputs: int
    n_unparsed: int
    n_truncated: int
    n_left_out: int

    @classmethod
    def of(cls, answered: Sequence[Answered]) -> Counts:
        """Of a whole set."""
        outputs = [output for question in answered for output in question.outputs]
        valued = sum(question.score is not None for question in answered)
        silent = [question for question in answered if not question.outputs]
        no_output = sum(question.fault is None or question.fault[0] == NO_OUTPUT for question in silent)
        return cls(
            n_total=len(answered),
            n_scored=valued,
            n_bad_media=len(silent) - no_output,
            n_no_output=no_output,
            n_no_value=len(answered) - len(silent) - valued,
            n_outputs=len(outputs),
            n_unparsed=sum(output.reading.answer is None for output in outputs),
            n_truncated=sum(output.finish_reason == "length" for output in outputs),
            n_left_out=sum(not output.reading.counts for output in outputs),
        )

    def to_row(self) -> dict[str, Any]:
        """The counts, and as shares of the outputs those that are about outputs (None without any)."""
        shares = {
            f"{name}_share": getattr(self, f"n_{name}") / self.n_outputs if self.n_outputs else None
            for name in ("unparsed", "truncated", "left_out")
        }
        return {**asdict(self), **shares}


@dataclass(frozen=True)
class Measures:
    """Of one evaluation set.

    ``accuracy``: the mean over questions of the mean over their outputs (mean@n). ``pass_at_k``: some one of k outputs
    earns full marks. ``majority_at_k``: the most common of k answers counts. ``chance``: the accuracy of guessing among
    the options, None if a question has none. ``mean_tokens``: of an output, None if nobody counted them.
    ``format_rate``: share of outputs in the expected format, None where none is expected.
    """

    accuracy: Figure
    by_category: Mapping[str, Figure]
    pass_at_k: Mapping[int, Figure]
    majority_at_k: Mapping[int, Figure]
    counts: Counts
    chance: float | None
    mean_tokens: float | None
    format_rate: float | None

    def to_row(self) -> dict[str, Any]:
        """As results and reports have it."""
        return {
            "accuracy": self.accuracy.value,
            "standard_error": self.accuracy.standard_error,
            "n": self.accuracy.n,
            "clusters": self.accuracy.clusters,
            "by_category": {
                name: {"accuracy": one.value, "standard_error": one.standard_error, "n": one.n}
                for name, one in self.by_category.items()
            },
            "pass_at_k": {str(k): one.value for k, one in self.pass_at_k.items()},
            "majority_at_k": {str(k): one.value for k, one in self.majority_at_k.items()},
            "format_rate": self.format_rate,
            "mean_tokens": self.mean_tokens,
            "chance": self.chance,
            **self.counts.to_row(),
        }


def measure(answered: Sequence[Answered], formats: Iterable[float | None] = ()) -> Measures:
    """The measures of a set.

    Args:
        formats: of each output, in any order, whether it has the expected format; None where that has no value.
    """
    scored = [question for question in answered if question.score is not None]
    options = [question.num_options for question in scored]
    lengths = [output.num_tokens for question in answered for output in question.outputs]
    ks = ks_of(scored)
    return Measures(
        accuracy=figure_of(answered),
        by_category={name: figure_of(items) for name, items in sorted(_by_category(answered).items())},
        pass_at_k={k: figure_of(scored, partial(question_pass_at_k, k=k), limits=SCORES) for k in ks},
        majority_at_k={k: figure_of(scored, partial(question_majority_at_k, k=k), limits=SCORES) for k in ks},
        counts=Counts.of(answered),
        chance=mean(1 / n for n in options) if all(options) else None,
        mean_tokens=mean(length for length in lengths if length is not None),
        format_rate=mean(value for value in formats if value is not None),
    )


def figure_of(
    answered: Iterable[Answered], value: Value = score_of, unit: Unit = "fraction", limits: Limits | None = None
) -> Figure:
    """The mean over the questions that have the value, with its clustered standard error.

    Args:
        limits: of the value; None: those of scores for the score, otherwise none.
    """
    limits = limits or (SCORES if value is score_of else UNLIMITED)
    estimate = mean_of(values_of(answered, value), limits)
    if estimate is None:
        return Figure(None, 0, unit=unit)
    return estimate.figure(unit, 100.0 if unit == "percent" else 1.0)


def values_of(answered: Iterable[Answered], value: Value = score_of) -> list[Valued]:
    """(cluster, value) of the questions that have the value."""
    valued = ((question.cluster, value(question)) for question in answered)
    return [(cluster, number) for cluster, number in valued if number is not None]


def counted(question: Answered) -> list[tuple[Output, float]]:
    """The outputs that are in the question's figures, and their scores."""
    return [
        (output, output.reading.score)
        for output in question.outputs
        if output.reading.counts and output.reading.score is not None
    ]


def mean_over_outputs(question: Answered, value: Callable[[float], float]) -> float | None:
    """The mean of a function of the scores, over the outputs that count."""
    return mean(value(score) for _, score in counted(question))


def ks_of(answered: Sequence[Answered]) -> list[int]:
    """1, 2, 4, ... and n, for the fewest outputs n that a question has."""
    most = min((len(question.outputs) for question in answered), default=0)
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def pass_at_k(scores: Sequence[float], k: int) -> float | None:
    """The chance that some one of k of the outputs, drawn without replacement, earns full marks (1).

    The unbiased estimate 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al., "Evaluating Large Language Models
    Trained on Code", arXiv 2107.03374). None with fewer than k outputs.
    """
    if len(scores) < k:
        return None
    right = sum(score >= 1.0 for score in scores)
    return 1.0 - math.comb(len(scores) - right, k) / math.comb(len(scores), k)


def question_pass_at_k(question: Answered, k: int) -> float | None:
    """None where fewer than k outputs count."""
    return pass_at_k([score for _, score in counted(question)], k)


def question_majority_at_k(question: Answered, k: int) -> float | None:
    """See ``majority_at_k``; None where fewer than k outputs count."""
    outputs = counted(question)
    if len(outputs) < k:
        return None
    return majority_at_k([output.reading.answer for output, _ in outputs], [score for _, score in outputs], k)


def _by_category(answered: Iterable[Answered]) -> Mapping[str, list[Answered]]:
    result: dict[str, list[Answered]] = defaultdict(list)
    for question in answered:
        result[question.category].append(question)
    return result
