"""CPPO (arXiv 2503.22342): which rollouts train, and dynamic completion allocation for the tokens that pruning frees.

Rollouts are chosen by |advantage| before anything is computed on them again. The budget of the allocation is counted in
tokens, so it is met at every pruning rate: questions are added one by one while each brings the sum nearer to the
budget. It then ends within half of the cost of the last question looked at.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from vlm_pg.algorithms.settings import PruneMetric, PruneScope

# What G * (1 - P) may lack of a whole number: 10 * (1 - 0.9) is 0.9999999999999998.
ROUNDING = 1e-9


def num_kept(generations: int, prune_rate: float) -> int:
    """floor(G * (1 - P)): rollouts kept of a group of G at pruning rate P. num_kept(10, 0.9) == 1.

    Raises:
        ValueError: none would be kept.
    """
    kept = _floor_of_rest(generations, prune_rate)
    if kept < 1:
        # Rounded down to four places, so that the rate named here can be set.
        largest_rate = (generations - 1) * 10_000 // generations / 10_000
        smallest_group = math.ceil((1.0 - ROUNDING) / (1.0 - prune_rate))
        raise ValueError(
            f"A pruning rate of {prune_rate} keeps none of {generations} rollouts; at least one must train. "
            f"{generations} rollouts allow a rate of at most {largest_rate}, a rate of {prune_rate} needs at least "
            f"{smallest_group} rollouts. Lower algorithm.prune_rate or raise rollout.num_generations."
        )
    return kept


def prune(
    advantages: Sequence[Sequence[float]],
    rate: float,
    scope: PruneScope,
    metric: PruneMetric,
    correction: bool,
    keys: Sequence[bytes | str],
) -> list[list[float]]:
    """Weight of each rollout: 0 for a dropped one, 1 for a kept one (with ``correction``: see below).

    ``scope="question"`` keeps ``num_kept`` rollouts of each group, ``"rank"`` floor(n * (1 - rate)) of all n that are
    given, at least one, however they fall on the groups. ``metric="smallest"`` drops the smallest |advantage| (CPPO),
    ``"largest"`` the largest; of equal ones the earlier is kept. ``"random"`` drops by numbers that depend on a
    group's key and the rollout's index in it alone.

    ``correction`` makes the expected sum of weight * advantage * anything that without pruning: rollouts are drawn
    with inclusion probabilities p_i and weigh 1 / p_i. ``smallest``: p_i is proportional to |advantage|, held at 1,
    and the p_i add up to the number to keep (systematic sampling; Särndal, Swensson, Wretman: Model Assisted Survey
    Sampling, section 3.6). A rollout with advantage 0 is never drawn, which leaves terms that do not depend on the
    advantage (KL, entropy) without it; and fewer are kept where too few have an advantage. ``random``: all p_i are
    equal, so every term is corrected.

        prune([[0.1, -2.0, 1.0, 0.0]], 0.5, "question", "smallest", False, ["q"]) -> [[0.0, 1.0, 1.0, 0.0]]

    Args:
        advantages: of each rollout of each group.
        rate: share P of the rollouts to drop; 0 gives weights of exactly 1.
        keys: of each group; different in every step. They name the random numbers, so equal keys give equal choices.

    Returns:
        Weights in the shape of ``advantages``.

    Raises:
        ValueError: ``num_kept`` of a group refuses.
    """
    names = [
        [(key.encode() if isinstance(key, str) else key) + b"\x1f%d" % rollout for rollout in range(len(group))]
        for group, key in zip(advantages, keys, strict=True)
    ]
    if scope == "question":
        return [
            _weights_of(group, num_kept(len(group), rate), metric, correction, of_group)
            for group, of_group in zip(advantages, names, strict=True)
        ]
    everything = [advantage for group in advantages for advantage in group]
    kept = max(1, _floor_of_rest(len(everything), rate))
    weights = iter(_weights_of(everything, kept, metric, correction, [name for group in names for name in group]))
    return [[next(weights) for _ in group] for group in advantages]


def _weights_of(
    advantages: Sequence[float], kept: int, metric: PruneMetric, correction: bool, names: Sequence[bytes]
) -> list[float]:
    """Weights of rollouts that are compared with each other. ``names``: of each one's random number."""
    if kept >= len(advantages):
        return [1.0] * len(advantages)
    sizes = [abs(advantage) for advantage in advantages]
    if correction and metric == "smallest":
        return _drawn(sizes, kept, _uniform(names))
    order: dict[PruneMetric, list[float]] = {
        "smallest": [-size for size in sizes],
        "largest": sizes,
        "random": [_uniform([name]) for name in names] if metric == "random" else [],
    }
    # sorted is stable: of equal ones the earlier comes first.
    chosen = set(sorted(range(len(sizes)), key=order[metric].__getitem__)[:kept])
    weight = len(sizes) / kept if correction else 1.0
    return [weight if i in chosen else 0.0 for i in range(len(sizes))]


def _drawn(sizes: Sequence[float], kept: int, start: float) -> list[float]:
    """Inverse inclusion probabilities of a systematic sample, 0 for what is not in it. ``start`` in (0, 1)."""
    sizes = _in_proportion(sizes)
    certain = _certain(sizes, kept)
    left = kept - len(certain)
    rest = _in_proportion([0.0 if i in certain else size for i, size in enumerate(sizes)])
    reaching = list(accumulate(rest))
    weights = [1.0 if i in certain else 0.0 for i in range(len(sizes))]
    if left == 0 or reaching[-1] == 0.0:
        return weights
    # Sizes laid end to end; a mark at every step, and each size is shorter than a step: no rollout is marked twice.
    step = reaching[-1] / left
    last = bisect_left(reaching, reaching[-1])
    for mark in range(left):
        i = min(bisect_right(reaching, (mark + start) * step), last)  # the last mark may be rounded up to the end
        weights[i] = step / rest[i]
    return weights


def _in_proportion(sizes: Sequence[float]) -> list[float]:
    """The largest as 1: only proportions count, and these neither overflow nor vanish in sums and products."""
    largest = max(sizes)
    return [size / largest for size in sizes] if largest > 0.0 else list(sizes)


def _certain(sizes: Sequence[float], kept: int) -> set[int]:
    """Rollouts whose probability, proportional to their size among those not certain, would be 1 or more."""
    certain: set[int] = set()
    while True:
        rest = [i for i in range(len(sizes)) if i not in certain]
        total = math.fsum(sizes[i] for i in rest)
        left = kept - len(certain)
        # The margin keeps those that are 1 up to rounding from being marked twice.
        full = {i for i in rest if sizes[i] > 0.0 and sizes[i] * left >= total * (1.0 - ROUNDING)}
        if not full:
            return certain
        certain |= full


def _floor_of_rest(total: int, rate: float) -> int:
    return math.floor(total * (1.0 - rate) + ROUNDING)


def _uniform(names: Iterable[bytes]) -> float:
    """In (0, 1), on a grid of 2^-32, which keeps the last mark of a sample clear of the end."""
    digest = hashlib.sha256(b"prune\x1f" + b"\x1e".join(names)).digest()
    return (int.from_bytes(digest[:4], "big") + 0.5) * 2.0**-32


def fits(used: int, budget: int, cost: int) -> bool:
    """Whether a further question brings ``used`` nearer to ``budget`` than leaving it out does.

    fits(90, 100, 15) is True (105 is nearer than 90); fits(90, 100, 20) is False (110 is as far as 90).

    Args:
        used: tokens that train so far: prefixes, and responses that pruning keeps.
        budget: tokens that would train without pruning: prefixes and all responses of the step's own questions.
        cost: the same of the further question, after pruning. One that costs nothing brings nothing nearer.
    """
    return abs(used + cost - budget) < abs(used - budget)


def questions_needed(used: int, budget: int, mean_cost: float) -> int:
    """How many further questions to sample, if each costs ``mean_cost``: as many as ``fits`` would add.

    An estimate, as the cost of a question is known once it has been sampled. If the questions turn out cheaper, ask
    again; if dearer, ``fits`` leaves some of them out.

    Args:
        used, budget: as in ``fits``.
        mean_cost: tokens of a question after pruning, on average; those sampled so far tell.
    """
    return max(0, math.ceil((budget - used) / mean_cost - 0.5))
