"""Work assigned to data ranks so that all take about as long: groups whole where that balances, else some are split.

A group that is split pays its prefix once more on every further rank, so this is done only where the slowest rank gains
by it. Rewards and advantages are computed on whole groups before, and loss weights over all ranks: the assignment
cannot change the gradient. Pure and in whole numbers: every rank that knows the same sizes finds the same assignment.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vlm_pg.batching.cost import CostModel, GroupCosts, GroupWork
from vlm_pg.batching.plan import Piece, Shared
from vlm_pg.metrics import Chart, Metric

# The slowest rank's cost may be so many percent above the mean before anything is split.
TOLERANCE_PERCENT = 2
# How large parts of what exceeds a rank's share are made at first, in percent of it: one after the other is tried.
PART_PERCENTS = (100, 104, 108)

_CHART = Chart("Balance over ranks", 21)
COST_SPREAD = Metric("balance/cost_spread", "slowest rank's cost / mean", "same", _CHART)
IDLE_SHARE = Metric("balance/idle_share", "share of all ranks' time", "same", _CHART)
SPLIT_GROUPS = Metric("balance/split_groups", "groups", "same")
ADDED_WORK = Metric("balance/added_work", "share of the work, by splitting", "same")
# One for each rank: its share of all cost, and the share of its own time in which it waits for the slowest.
RANK_COST = Metric("balance/cost_share/", "share of all cost", "same", Chart("Share of the work by rank", 98))
RANK_IDLE = Metric("balance/idle/", "share of the rank's time", "same", Chart("Idle share by rank", 98))


@dataclass(frozen=True)
class Assignment:
    """The groups and responses that each rank computes.

    ``pieces``: of each rank, groups ascending; every response exactly once. ``costs``: estimated, of each rank.
    ``whole_cost``: of all groups on one rank, nothing split: what splitting and parting questions on one video add is
    ``sum(costs) - whole_cost``.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    costs: tuple[int, ...]
    whole_cost: int

    def metrics(self) -> dict[Metric, float]:
        """For the log; the same on all ranks."""
        total, slowest, ranks = sum(self.costs), max(self.costs), len(self.costs)
        ranks_of = Counter(piece.group for of_rank in self.pieces for piece in of_rank)
        found = {
            COST_SPREAD: slowest * ranks / total if total else 1.0,
            IDLE_SHARE: 1.0 - total / (slowest * ranks) if slowest else 0.0,
            SPLIT_GROUPS: float(sum(count > 1 for count in ranks_of.values())),
            ADDED_WORK: total / self.whole_cost - 1.0 if self.whole_cost else 0.0,
        }
        for rank, cost in enumerate(self.costs):
            found[RANK_COST.of(str(rank))] = cost / total if total else 0.0
            found[RANK_IDLE.of(str(rank))] = 1.0 - cost / slowest if slowest else 0.0
        return found


def assign_groups(
    groups: Sequence[GroupWork], ranks: int, token_budget: int, model: CostModel, shared: Shared = lambda i, j: 0
) -> Assignment:
    """Assign groups to ``ranks`` data ranks; groups stay whole within ``TOLERANCE_PERCENT``.

    Any number of groups, of responses and of ranks; a rank may get nothing. Prompts that share much stay on one rank
    as far as balance allows. Ranks keep what they hold already as far as balance leaves that open.

    Args:
        groups: the same list on every rank.
        token_budget: most tokens of a pass, see ``plan_micro_batches``.
        shared: (i, j) -> tokens that prompts i and j share where they stand in one micro-batch; called with i < j.

    Raises:
        ValueError: no rank, a group held by a rank there is not, or a group without responses.

    Example: ``assign_groups([GroupWork(10, (5, 5)), GroupWork(10, (5, 5))], 2, 100, CostModel(1, 0))`` gives each rank
    one group.
    """
    if ranks < 1:
        raise ValueError(f"Work was to be assigned to {ranks} ranks; it takes at least 1.")
    for index, group in enumerate(groups):
        if not group.responses:
            raise ValueError(f"Group {index} has no response, so there is nothing to compute. Leave it out.")
        if not 0 <= group.rank < ranks:
            raise ValueError(
                f"Group {index} is held by rank {group.rank}, but there are {ranks} ranks. Pass ranks from 0 to "
                f"{ranks - 1}."
            )
    costs = GroupCosts(groups, model, token_budget, shared)
    search = min(_searches(costs, ranks), key=lambda found: found.slowest)
    pieces = keep_at_home(search.held, costs)
    return Assignment(
        tuple(tuple(Piece(group, of_rank[group]) for group in sorted(of_rank)) for of_rank in pieces),
        tuple(costs.rank(of_rank) for of_rank in pieces),
        costs.rank(_whole(costs, range(len(groups)))),
    )


def _searches(costs: GroupCosts, ranks: int) -> Iterator[Search]:
    """From several beginnings, until one leads to an assignment within the tolerance."""
    for part_percent in PART_PERCENTS:
        search = Search(costs, ranks, largest_first(costs, ranks, part_percent))
        search.run()
        yield search
        if search.is_even:
            break
    if costs.groups and len(costs.groups) % ranks == 0:
        # Equally many groups each, by the tokens that they would have if every prefix were repeated: what others
        # balance by. Seldom the better start; it guarantees a slowest rank no slower than that balancing has.
        parts = equal_counts([_repeated_work(work) for work in costs.groups], ranks)
        even = Search(costs, ranks, [_whole(costs, of_rank) for of_rank in parts])
        if even.slowest < search.slowest:
            even.run()
            yield even


def _repeated_work(group: GroupWork) -> int:
    """Of a group whose prefix is repeated for every response: verl's ``calculate_workload``, summed over it.

    A sequence of L tokens counts 24576 L + L ** 2, operations of a model of hidden size 4096.
    """
    lengths = [group.prompt_tokens + tokens + 1 for tokens in group.responses]
    return sum(24576 * length + length**2 for length in lengths)


# Of one rank: group -> which of its responses, ascending.
Held = dict[int, tuple[int, ...]]
# Sum, number and (index, value) of items that go together; compared in this order.
_Part = tuple[int, int, list[tuple[int, int]]]

# Ranks that the slowest one tries to hand something to: so many of the least loaded.
TRIED_RANKS = 8
# Partners of similar size that are tried for an exchange of two groups.
TRIED_PARTNERS = 2
# Steps of the search per rank. It stops by itself long before.
MOST_STEPS = 64
# Rounds in which parts and the share that decides how many there are settle.
SETTLING = 4


class Search:
    """An assignment that gets better: the slowest rank hands work on as long as that makes the slowest faster.

    Args:
        held: what each rank has at first.
    """

    def __init__(self, costs: GroupCosts, ranks: int, held: Sequence[Held]):
        self.costs, self.ranks = costs, ranks
        self.held = list(held)
        self.of_rank = [self.costs.rank(held) for held in self.held]

    @property
    def slowest(self) -> int:
        return max(self.of_rank)

    @property
    def is_even(self) -> bool:
        """Within the tolerance of the mean, or of the one group that no assignment is faster than."""
        at_best = max(sum(self.of_rank), self.ranks * self.costs.longest)
        return self.slowest * self.ranks * 100 <= at_best * (100 + TOLERANCE_PERCENT)

    def run(self) -> None:
        """Whole groups are moved or swapped first; where that no longer helps, groups are split."""
        for _ in range(MOST_STEPS * self.ranks):
            if self.is_even or not (self._improve(self._whole_groups) or self._improve(self._parts)):
                return

    def _improve(self, changes: Callable[[int, int], Iterator[tuple[Held, Held]]]) -> bool:
        """Make the best of some changes between the slowest rank and lighter ones; whether there was a good one."""
        slow = self.of_rank.index(self.slowest)
        lightest = sorted((cost, rank) for rank, cost in enumerate(self.of_rank) if rank != slow)[:TRIED_RANKS]
        best: tuple[int, tuple[int, Held, Held]] | None = None
        for _, other in lightest:
            for given, returned in changes(slow, other):
                after = max(
                    self.of_rank[slow] + self._added(slow, given, returned),
                    self.of_rank[other] + self._added(other, returned, given),
                )
                if after < (self.of_rank[slow] if best is None else best[0]):
                    best = after, (other, given, returned)
        if best is None:
            return False
        _, (other, given, returned) = best
        for rank, away, back in ((slow, given, returned), (other, returned, given)):
            self.of_rank[rank] += self._added(rank, away, back)
            self.held[rank] = _exchanged(self.held[rank], away, back)
        return True

    def _added(self, rank: int, given: Held, received: Held) -> int:
        """What giving and receiving adds to a rank's cost."""
        held, cost = self.held[rank], self.costs
        gone = {group for group, responses in given.items() if len(responses) == len(held[group])}
        added = cost.of_responses(received) - cost.of_responses(given)
        for cluster in {cost.cluster[group] for group in (*given, *received)}:
            before = tuple(member for member in cluster if member in held)
            after = tuple(m for m in cluster if (m in held and m not in gone) or m in received)
            if after != before:
                added += cost.prefixes(after) - cost.prefixes(before)
        return added

    def _whole_groups(self, slow: int, other: int) -> Iterator[tuple[Held, Held]]:
        """What the slow rank holds of a group for nothing, or for what the other holds of one."""
        half = (self.of_rank[slow] - self.of_rank[other]) // 2
        alone = sorted((self._alone(other, group), group) for group in self.held[other])
        sizes = ((self._alone(slow, group), group) for group in self.held[slow])
        by_distance = sorted((abs(size - half), size, group) for size, group in sizes)
        for _, _, group in by_distance[: 2 * TRIED_PARTNERS]:
            yield {group: self.held[slow][group]}, {}
        for group, responses in self.held[slow].items():
            wanted = self._alone(slow, group) - half
            if wanted <= 0:
                continue
            index = bisect_left(alone, (wanted, 0))
            for _, partner in alone[max(0, index - TRIED_PARTNERS) : index + TRIED_PARTNERS]:
                if partner != group:
                    yield {group: responses}, {partner: self.held[other][partner]}
        # All that the slow rank holds of a cluster, for nothing.
        held = self.held[slow]
        for first in held:
            members = [group for group in self.costs.cluster[first] if group in held]
            if len(members) > 1 and members[0] == first:
                yield {group: held[group] for group in members}, {}

    def _parts(self, slow: int, other: int) -> Iterator[tuple[Held, Held]]:
        """Some responses of a group, so many that both ranks come out alike."""
        for group, responses in self.held[slow].items():
            is_there = group in self.held[other]
            if len(responses) < 2 and not is_there:
                continue
            again = 0 if is_there else self._added(other, {}, {group: ()})
            room = (self.of_rank[slow] - self.of_rank[other] - again) // 2
            if chosen := self._filling(group, responses, room):
                yield {group: chosen}, {}

    def _filling(self, group: int, responses: Sequence[int], room: int) -> tuple[int, ...]:
        """Responses that cost at most ``room`` together, the large ones first; all but one at most."""
        chosen: list[int] = []
        of_group = self.costs.responses[group]
        for _, index in sorted((-of_group[index], index) for index in responses):
            if of_group[index] <= room:
                chosen.append(index)
                room -= of_group[index]
        return tuple(sorted(chosen[: len(responses) - 1] if len(chosen) == len(responses) else chosen))

    def _alone(self, rank: int, group: int) -> int:
        """What a rank holds of a group, its prefix as if it were not shared."""
        return self.costs.prefixes((group,)) + self.costs.of_responses({group: self.held[rank][group]})


def largest_first(costs: GroupCosts, ranks: int, part_percent: int) -> list[Held]:
    """Clusters, or parts (in percent of a rank's share) of those that a rank would be too slow with; each to the rank
    with least."""
    whole = [costs.prefixes(members) + sum(sum(costs.responses[m]) for m in members) for members in costs.clusters]
    limit = _least_slowest(costs, ranks, whole) * part_percent // 100
    units: list[tuple[int, Held]] = []
    for cost, members in zip(whole, costs.clusters, strict=True):
        if cost <= limit:
            units.append((cost, _whole(costs, members)))
        else:
            units += _parts(costs, members, limit)
    held: list[Held] = [{} for _ in range(ranks)]
    # (load, rank): the lightest first.
    loads = [(0, rank) for rank in range(ranks)]
    for cost, unit in sorted(units, key=lambda unit: (-unit[0], sorted(unit[1].items()))):
        load, rank = heapq.heappop(loads)
        held[rank] = _exchanged(held[rank], {}, unit)
        heapq.heappush(loads, (load + cost, rank))
    return held


def _whole(costs: GroupCosts, groups: Iterable[int]) -> Held:
    """The groups with all their responses."""
    return {group: tuple(range(len(costs.responses[group]))) for group in groups}


def _least_slowest(costs: GroupCosts, ranks: int, whole: Sequence[int]) -> int:
    """What the slowest rank takes at least: its share of all work, parts of what exceeds it paying their prefix again.

    ``whole``: of each cluster.
    """
    total, alone = sum(whole), costs.longest
    limit = max(alone, -(-total // ranks))
    for _ in range(SETTLING):
        split = total
        for cost, members in zip(whole, costs.clusters, strict=True):
            if cost > limit:
                split += sum(of_part for of_part, _ in _parts(costs, members, limit)) - cost
        limit = max(alone, -(-split // ranks))
    return limit


def _parts(costs: GroupCosts, members: Sequence[int], limit: int) -> list[tuple[int, Held]]:
    """A cluster in parts of at most ``limit``, each with its prefixes: all full but the last one."""
    parts: list[tuple[int, Held]] = []
    taken: dict[int, list[int]] = {}
    of_responses = cost = 0
    for member in members:
        of_member = costs.responses[member]
        for negative, index in sorted((-cost, index) for index, cost in enumerate(of_member)):
            with_it = costs.prefixes(tuple(sorted({*taken, member}))) + of_responses - negative
            if taken and with_it > limit:
                parts.append((cost, {group: tuple(sorted(chosen)) for group, chosen in taken.items()}))
                taken, of_responses = {}, 0
                with_it = costs.prefixes((member,)) - negative
            taken.setdefault(member, []).append(index)
            of_responses, cost = of_responses - negative, with_it
    return [*parts, (cost, {group: tuple(sorted(chosen)) for group, chosen in taken.items()})] if taken else parts


def keep_at_home(held: Sequence[Held], costs: GroupCosts) -> list[Held]:
    """The same parts, each at the rank that holds most of it already: fewest prompts and media to send around."""
    ranks = len(held)
    at_home = []
    for part, of_part in enumerate(held):
        stays = [0] * ranks
        for group in of_part:
            work = costs.groups[group]
            # What is sent of a group is its prompt: ids, and features of its media.
            stays[work.rank] += work.prompt_tokens
        at_home += [(-tokens, part, rank) for rank, tokens in enumerate(stays)]
    part_of: dict[int, int] = {}
    for _, part, rank in sorted(at_home):
        if rank not in part_of and part not in part_of.values():
            part_of[rank] = part
    return [held[part_of[rank]] for rank in range(ranks)]


def _exchanged(held: Held, given: Held, received: Held) -> Held:
    """What a rank has after it gave something away and received something."""
    after = dict(held)
    for group, responses in given.items():
        left = tuple(index for index in after[group] if index not in responses)
        if left:
            after[group] = left
        else:
            del after[group]
    for group, responses in received.items():
        after[group] = tuple(sorted((*after.get(group, ()), *responses)))
    return after


def equal_counts(values: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``values`` in ``parts`` lists of equal length whose sums are close.

    Rows of ``parts`` items of similar size are formed; the two rows of the largest differences are laid over each
    other, the large items of one on the small ones of the other, until one row of sums is left.

    Raises:
        ValueError: the number of values is no multiple of ``parts``.
    """
    if not values or len(values) % parts:
        raise ValueError(f"{len(values)} items cannot make {parts} parts of equally many. Pass a multiple of {parts}.")
    ascending = sorted((value, index) for index, value in enumerate(values))
    items = [(value, 1, [(index, value)]) for value, index in ascending]
    rows = [_entry(items[start : start + parts]) for start in range(0, len(items), parts)]
    heapq.heapify(rows)
    while len(rows) > 1:
        one, other = heapq.heappop(rows)[-1], heapq.heappop(rows)[-1]
        heapq.heappush(
            rows, _entry([(a + c, b + d, x + y) for (a, b, x), (c, d, y) in zip(one, reversed(other), strict=True)])
        )
    return [sorted(index for index, _ in items) for _, _, items in rows[0][-1]]


def _entry(row: list[_Part]) -> tuple[int, tuple[int, int], list[tuple[int, int]], list[_Part]]:
    """For a heap that gives the largest difference first, and among equal ones the largest part."""
    descending = sorted(row, reverse=True)
    total, count, items = descending[0]
    return descending[-1][0] - total, (-total, -count), [(-index, -value) for index, value in items], descending
