"""Measures of every evaluation set: accuracy, pass@k, majority@k, output lengths, and counts of what is missing.

Outputs that a published rule leaves out of its denominator, or whose question has no value (its gold answer cannot be
used), are counted, and enter no figure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any

from vlm_pg.eval.contracts import Answered, Output
from vlm_pg.eval.estimates import SCORES, UNLIMITED, Figure, Limits, Unit, Valued, mean, mean_of

# The reason (``Answered.fault``) of a question without an output, where outputs were made by another program.
NO_OUTPUT = "no_output"
Value = Callable[[Answered], float | None]


def score_of(question: Answered) -> float | None:
    """The mean score of a question's outputs."""
    return question.score


def measure(answered: Sequence[Answered], formats: Iterable[float | None] = ()) -> dict[str, Any]:
    """The measures of a set, as results and reports have them.

    ``accuracy``: the mean over questions of the mean over their outputs (mean@n), with ``standard_error``, ``n`` and
    ``clusters``; ``by_category`` likewise. ``pass_at_k``: some one of k outputs earns full marks. ``majority_at_k``:
    the most common of k answers counts. ``chance``: the accuracy of guessing among the options, None if a question has
    none. ``mean_tokens``: per output, None if not counted. ``format_rate``: share of outputs in the expected format,
    None where none is expected. The others: ``counts_of``, and the ones about outputs as shares of all outputs.

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

    accuracy = figure_of(answered)
    categories = {name: figure_of(questions) for name, questions in sorted(by_category.items())}
    counts = counts_of(answered)
    return {
        "accuracy": accuracy.value,
        "standard_error": accuracy.standard_error,
        "n": accuracy.n,
        "clusters": accuracy.clusters,
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


# Coefficients by power; index 0 is the constant.
_Polynomial = tuple[int, ...]


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


def _ways_of_others(others: Mapping[int, int], unread: int, votes: int) -> list[_Polynomial]:
    """Ways to draw the others, none above ``votes``, and the unread, by the number of others tied at ``votes``.

    Args:
        others: how many other answers there are of each number of outputs.
    """
    by_ties: list[_Polynomial] = [tuple(math.comb(unread, drawn) for drawn in range(unread + 1))]
    for count, answers in others.items():
        below = tuple(math.comb(count, drawn) for drawn in range(min(count, votes - 1) + 1))
        powers: list[_Polynomial] = [(1,)]
        for _ in range(answers):
            powers.append(_product(powers[-1], below))
        at_votes = math.comb(count, votes)
        most = answers if at_votes else 0
        after: list[_Polynomial] = [()] * (len(by_ties) + most)
        for tied in range(most + 1):
            ways = math.comb(answers, tied) * at_votes**tied
            factor = (0,) * (votes * tied) + tuple(ways * number for number in powers[answers - tied])
            for ties, so_far in enumerate(by_ties):
                added = zip_longest(after[ties + tied], _product(so_far, factor), fillvalue=0)
                after[ties + tied] = tuple(map(sum, added))
        by_ties = after
    return by_ties


def _product(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    result = [0] * (len(left) + len(right) - 1)
    for power, number in enumerate(left):
        for other_power, other in enumerate(right):
            result[power + other_power] += number * other
    return tuple(result)
