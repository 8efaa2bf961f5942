"""Measures of every evaluation set: accuracy, pass@k, majority@k, output lengths, and counts of what is missing.

Outputs that a published rule leaves out of its denominator, or whose question has no value (its gold answer cannot be
used), are counted, and enter no figure.

Questions of one video or image are not independent draws: they are one cluster. With G clusters, n questions and
cluster sums of deviations D_g = sum over its questions of (x_i - mean), the standard error of a mean is

    sqrt(G / (G - 1) * sum over g of D_g^2) / n

(the cluster-robust sandwich for a mean with its finite-sample factor G / (G - 1): Cameron & Miller, "A Practitioner's
Guide to Cluster-Robust Inference", Journal of Human Resources 2015; without the factor, "CR0", it is the
clustered error of Miller, "Adding Error Bars to Evals", arXiv 2411.00640).

A figure made of several means, f(m_1, ..., m_H), moves by df/dm_h for each (the delta method). Cluster g moves it by
U_g = sum over h of df/dm_h * sqrt(G_h / (G_h - 1)) * D_hg / n_h, and its standard error is sqrt(sum over g of U_g^2).
With clusters that lie in one group each it is the stratified error sum of w_h^2 * se_h^2; a video whose questions fall
into two groups brings their covariance with it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.polynomial.polynomial import polyadd, polymul

from vlm_pg.eval.contracts import Answered, Output

Unit = Literal["fraction", "percent"]
# (cluster, value) of one question
Valued = tuple[str, float]
# Least and largest possible value.
Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)
SCORES: Limits = (0.0, 1.0)
# Below, a standard error is rounding: no spread was seen, which says nothing about its size.
_MIN_ERROR = 1e-12
_HALVINGS = 100  # of the angle's range in ``t_quantile``: far beyond what a float can hold


@dataclass(frozen=True)
class Figure:
    """One number of a table: None where nothing could be scored.

    ``n``: questions behind it. ``clusters``: videos or images behind it. ``standard_error``: see the module; None
    where it cannot be estimated, since all questions of a group are about one video. ``limits``: of the value.

    Figure(0.625, n=8, clusters=4, standard_error=0.1)
    """

    value: float | None
    n: int
    clusters: int = 0
    standard_error: float | None = None
    unit: Unit = "fraction"
    limits: Limits = UNLIMITED

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %: t standard errors to either side, t of clusters - 1 degrees of freedom, within the limits.

        None without a standard error, or with one of 0: a few equal scores would claim certainty.
        """
        if self.value is None or self.standard_error is None or self.standard_error < _MIN_ERROR:
            return None
        reach = t_quantile(self.clusters - 1) * self.standard_error
        return max(self.limits[0], self.value - reach), min(self.limits[1], self.value + reach)

    def to_row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "value": self.value,
            "standard_error": self.standard_error,
            "interval_95": None if self.interval is None else list(self.interval),
            "n": self.n,
            "clusters": self.clusters,
            "unit": self.unit,
        }


@dataclass(frozen=True)
class Estimate:
    """A value, and by how much each cluster moves it (U_g of the module)."""

    value: float
    n: int
    moves: Mapping[str, float]
    has_error: bool
    limits: Limits = UNLIMITED

    @property
    def standard_error(self) -> float | None:
        """None where a group has one cluster only."""
        return math.sqrt(math.fsum(move**2 for move in self.moves.values())) if self.has_error else None

    def figure(self, unit: Unit = "fraction", scale: float = 1.0) -> Figure:
        """``scale`` (positive) times the value."""
        error = self.standard_error
        return Figure(
            self.value * scale,
            self.n,
            len(self.moves),
            None if error is None else scale * error,
            unit,
            (self.limits[0] * scale, self.limits[1] * scale),
        )


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def mean_of(values: Sequence[Valued], limits: Limits = UNLIMITED) -> Estimate | None:
    """The mean over questions; None without any. ``limits``: of every value."""
    if not values:
        return None
    average = math.fsum(value for _, value in values) / len(values)
    deviations: dict[str, list[float]] = defaultdict(list)
    for cluster, value in values:
        deviations[cluster].append(value - average)
    count = len(deviations)
    factor = math.sqrt(count / (count - 1)) if count > 1 else 1.0
    moves = {cluster: factor * math.fsum(each) / len(values) for cluster, each in deviations.items()}
    return Estimate(average, len(values), moves, count > 1, limits)


def combination(value: float, parts: Iterable[tuple[float, Estimate]], limits: Limits = UNLIMITED) -> Estimate:
    """A figure made of several estimates.

    Args:
        value: the figure.
        parts: of each estimate, what the figure changes by for a small change of it (its weight in a weighted mean).
        limits: of the figure.
    """
    parts = list(parts)
    moves: dict[str, list[float]] = defaultdict(list)
    for slope, part in parts:
        for cluster, move in part.moves.items():
            moves[cluster].append(slope * move)
    return Estimate(
        value,
        sum(part.n for _, part in parts),
        {cluster: math.fsum(each) for cluster, each in moves.items()},
        all(part.has_error for _, part in parts),
        limits,
    )


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate | None:
    """Every estimate counts alike, however many questions it has; None without any."""
    if not estimates:
        return None
    share = 1 / len(estimates)
    value = math.fsum(part.value for part in estimates) / len(estimates)
    limits = min(part.limits[0] for part in estimates), max(part.limits[1] for part in estimates)
    return combination(value, [(share, part) for part in estimates], limits)


@lru_cache(maxsize=1024)
def t_quantile(degrees: int) -> float:
    """Half width, in standard errors, of a 95 % interval with Student's t of so many degrees (1 or more): 2.776 for 4.

    The distribution has a closed form in the angle atan(t / sqrt(degrees)) (Abramowitz & Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4), which is inverted by halving.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _coverage(middle, degrees) < 0.95:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _coverage(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine * cosine
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


# The reason (``Answered.fault``) of a question without an output, where outputs were made by another program.
NO_OUTPUT = "no_output"
Value = Callable[[Answered], float | None]


def score_of(question: Answered) -> float | None:
    """The mean score of a question's outputs."""
    return question.score


def measure(answered: Sequence[Answered], formats: Iterable[float | None] = ()) -> dict[str, Any]:
    """The measures of a set beside its figures, as results and reports have them.

    ``by_category``: the mean over questions of the mean over their outputs (mean@n). ``pass_at_k``: some one of k
    outputs earns full marks. ``majority_at_k``: the most common of k answers counts. ``chance``: the accuracy of
    guessing among the options, None if a question has none. ``mean_tokens``: per output, None if not counted.
    ``format_rate``: share of outputs in the expected format, None where none is expected. The others: ``counts_of``,
    and the ones about outputs as shares of all outputs.

    Args:
        formats: of each output, in any order, whether it has the expected format; None where that has no value.
    """
    scored = [question for question in answered if question.score is not None]
    options = [question.num_options for question in scored]
    lengths = [output.num_tokens for question in answered for output in question.outputs]
    by_category: dict[str, list[Answered]] = defaultdict(list)
    for question in answered:
        by_category[question.category].append(question)

    def by_k(value: Callable[..., float | None]) -> dict[str, float | None]:
        return {str(k): figure_of(scored, partial(value, k=k)).value for k in ks_of(scored)}

    categories = {name: figure_of(questions) for name, questions in sorted(by_category.items())}
    counts = counts_of(answered)
    return {
        "by_category": {
            name: {"accuracy": one.value, "standard_error": one.standard_error, "n": one.n}
            for name, one in categories.items()
        },
        "pass_at_k": by_k(question_pass_at_k),
        "majority_at_k": by_k(question_majority_at_k),
        "format_rate": mean(value for value in formats if value is not None),
        "mean_tokens": mean(length for length in lengths if length is not None),
        "chance": mean(1 / n for n in options) if all(options) else None,
        **counts,
        **{
            f"{name}_share": counts[f"n_{name}"] / counts["n_outputs"] if counts["n_outputs"] else None
            for name in ("unparsed", "truncated", "left_out")
        },
    }


def counts_of(answered: Sequence[Answered]) -> dict[str, int]:
    """What the figures of a set stand on.

    Questions: ``n_total`` = ``n_scored`` + ``n_bad_media`` (media or prompt could not be used) + ``n_no_output``
    (without an output) + ``n_no_value`` (with outputs, none of which has a value that counts).
    Outputs: ``n_outputs`` in all; ``n_unparsed`` give no answer, ``n_truncated`` were cut off by the length limit,
    ``n_left_out`` do not count by the set's rule.
    """
    outputs = [output for question in answered for output in question.outputs]
    scored = sum(question.score is not None for question in answered)
    without = [question for question in answered if not question.outputs]
    no_output = sum(question.fault is None or question.fault[0] == NO_OUTPUT for question in without)
    return {
        "n_total": len(answered),
        "n_scored": scored,
        "n_bad_media": len(without) - no_output,
        "n_no_output": no_output,
        "n_no_value": len(answered) - len(without) - scored,
        "n_outputs": len(outputs),
        "n_unparsed": sum(output.reading.answer is None for output in outputs),
        "n_truncated": sum(output.finish_reason == "length" for output in outputs),
        "n_left_out": sum(not output.reading.counts for output in outputs),
    }


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


def ks_of(answered: Sequence[Answered]) -> list[int]:
    """1, 2, 4, ... and n, for the fewest outputs n that a question has."""
    most = min((len(question.outputs) for question in answered), default=0)
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def question_pass_at_k(question: Answered, k: int) -> float | None:
    """The chance that some one of k of the outputs, drawn without replacement, earns full marks (1).

    The unbiased estimate 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al., "Evaluating Large Language Models
    Trained on Code", arXiv 2107.03374). None where fewer than k outputs count.
    """
    scores = [score for _, score in counted(question)]
    if len(scores) < k:
        return None
    right = sum(score >= 1.0 for score in scores)
    return 1.0 - math.comb(len(scores) - right, k) / math.comb(len(scores), k)


def question_majority_at_k(question: Answered, k: int) -> float | None:
    """See ``majority_at_k``; None where fewer than k outputs count."""
    outputs = counted(question)
    if len(outputs) < k:
        return None
    return majority_at_k([output.reading.answer for output, _ in outputs], [score for _, score in outputs], k)


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The expected score when k of the n outputs are drawn without replacement and the most common answer counts.

    Exact: the expectation over every choice of k, without trying them. Equally common answers share evenly. None has no
    vote, but is drawn like the others; without any vote the score is 0. An answer scores the mean of its outputs'
    scores.
    """
    of_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            of_answer[answer].append(score)
    unread = len(answers) - sum(map(len, of_answer.values()))
    chances = _win_chances(tuple(sorted(len(each) for each in of_answer.values())), unread)
    return math.fsum(chances[len(each)][k] * math.fsum(each) / len(each) for each in of_answer.values())


@lru_cache(maxsize=4096)
def _win_chances(counts: tuple[int, ...], unread: int) -> Mapping[int, tuple[float, ...]]:
    """Of an answer that ``c`` of the outputs give: its share of the win for k = 0, 1, ..., n.

    An answer wins with j votes when no other has more; with t others at j, it has 1 / (t + 1) of the win. The number of
    ways is a coefficient of a product of polynomials in x, the number of outputs drawn: (number of ways to draw j of
    its c) times, for every other answer, the ways to draw fewer than j, or j of it (one of the t), times the ways to
    draw any number of unread ones. All are whole numbers, so nothing is rounded before the last division.
    """
    total = sum(counts) + unread
    sizes = Counter(counts)
    result: dict[int, tuple[float, ...]] = {}
    for count in sizes:
        others = sizes.copy()
        others[count] -= 1
        shares: list[list[float]] = [[] for _ in range(total + 1)]
        for votes in range(1, count + 1):
            for ties, ways in enumerate(_ways_of_others(others, unread, votes)):
                for drawn, number in enumerate(ways):
                    every = math.comb(total, drawn + votes)
                    shares[drawn + votes].append(math.comb(count, votes) * number / ((ties + 1) * every))
        result[count] = tuple(map(math.fsum, shares))
    return result


def _ways_of_others(others: Mapping[int, int], unread: int, votes: int) -> list[np.ndarray]:
    """Ways to draw the others, none above ``votes``, and the unread, by the number of others tied at ``votes``.

    Args:
        others: how many other answers there are of each number of outputs.
    """
    by_ties = [_ways(unread, unread)]
    for count, answers in others.items():
        below, at_votes = _ways(count, votes - 1), math.comb(count, votes)
        powers = list(accumulate([below] * answers, polymul, initial=_ways(0, 0)))
        most = answers if at_votes else 0
        after = [np.array([0], object)] * (len(by_ties) + most)
        for tied in range(most + 1):
            ways = math.comb(answers, tied) * at_votes**tied
            tied_at_votes = np.array([0] * (votes * tied) + [ways], object)
            factor = polymul(tied_at_votes, powers[answers - tied])
            for ties, so_far in enumerate(by_ties):
                after[ties + tied] = polyadd(after[ties + tied], polymul(so_far, factor))
        by_ties = after
    return by_ties


def _ways(count: int, most: int) -> np.ndarray:
    """Ways to draw 0, 1, ... and ``most`` of so many outputs: whole numbers of any size, as a polynomial."""
    return np.array([math.comb(count, drawn) for drawn in range(min(count, most) + 1)], object)
