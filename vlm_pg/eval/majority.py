"""Majority votes over k of n outputs, exactly: the expectation over every choice of k, without trying them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

# Coefficients by power; index 0 is the constant.
_Polynomial = tuple[int, ...]


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The expected score when k of the outputs are drawn without replacement and the most common answer counts.

    Answers that are equally common share evenly. None has no vote: it takes a place among the k and speaks for nothing;
    without any vote the score is 0. An answer scores the mean of its outputs' scores.

    Args:
        answers, scores: of the n outputs.
        k: from 1 to n.

    Raises:
        ValueError: k is not, or the lengths differ.
    """
    if len(answers) != len(scores) or not 1 <= k <= len(answers):
        raise ValueError(
            f"A vote of {k} among {len(answers)} answers with {len(scores)} scores cannot be held. Give as many scores "
            "as answers, and k from 1 to their number."
        )
    of_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            of_answer[answer].append(score)
    silent = len(answers) - sum(map(len, of_answer.values()))
    chances = _win_chances(tuple(sorted(len(each) for each in of_answer.values())), silent)
    return math.fsum(chances[len(each)][k] * math.fsum(each) / len(each) for each in of_answer.values())


@lru_cache(maxsize=4096)
def _win_chances(counts: tuple[int, ...], silent: int) -> Mapping[int, tuple[float, ...]]:
    """Of an answer that ``c`` of the outputs give: its share of the win for k = 0, 1, ..., n.

    An answer wins with j votes when no other has more; with t others at j, it has 1 / (t + 1) of the win. The number of
    ways is a coefficient of a product of polynomials in x, the number of outputs drawn: (number of ways to draw j of
    its c) times, for every other answer, the ways to draw fewer than j, or j of it (one of the t), times the ways to
    draw any number of silent ones. All are whole numbers, so nothing is rounded before the last division.
    """
    total = sum(counts) + silent
    sizes = Counter(counts)
    result: dict[int, tuple[float, ...]] = {}
    for count in sizes:
        others = sizes.copy()
        others[count] -= 1
        shares: list[list[float]] = [[] for _ in range(total + 1)]
        for votes in range(1, count + 1):
            for ties, ways in enumerate(_ways_of_others(others, silent, votes)):
                for drawn, number in enumerate(ways):
                    every = math.comb(total, drawn + votes)
                    shares[drawn + votes].append(math.comb(count, votes) * number / ((ties + 1) * every))
        result[count] = tuple(map(math.fsum, shares))
    return result


def _ways_of_others(others: Mapping[int, int], silent: int, votes: int) -> list[_Polynomial]:
    """By the number of ties at ``votes``: in how many ways the others, none above ``votes``, and the silent are drawn.

    Args:
        others: how many other answers there are of each number of outputs.
    """
    by_ties: list[_Polynomial] = [tuple(math.comb(silent, drawn) for drawn in range(silent + 1))]
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
                after[ties + tied] = _sum(after[ties + tied], _product(so_far, factor))
        by_ties = after
    return by_ties


def _product(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    result = [0] * (len(left) + len(right) - 1)
    for place, number in enumerate(left):
        if number:
            for offset, other in enumerate(right):
                result[place + offset] += number * other
    return tuple(result)


def _sum(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return tuple(number + (shorter[place] if place < len(shorter) else 0) for place, number in enumerate(longer))
