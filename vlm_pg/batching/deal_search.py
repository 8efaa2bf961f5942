"""The search behind ``deal_groups``: the slowest rank hands work on as long as that makes the slowest faster."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vlm_pg.batching.cost import GroupCosts

# Of one rank: group -> which of its responses, ascending.
Held = dict[int, tuple[int, ...]]
# What one rank hands to another and gets in return.
Change = tuple[int, Held, Held]

# Ranks that the slowest one tries to hand something to: so many of the least loaded.
TRIED_RANKS = 8
# Partners of similar size that are tried for an exchange of two groups.
TRIED_PARTNERS = 2
# Steps of the search per rank. It stops by itself long before.
MOST_STEPS = 64
# Rounds in which parts and the share that decides how many there are settle.
SETTLING = 4


class Search:
    """A deal that gets better.

    Args:
        held: what each rank has at first.
        tolerance_percent: good enough is a slowest rank so little above the mean.
    """

    def __init__(self, costs: GroupCosts, ranks: int, tolerance_percent: int, held: Sequence[Held]):
        self.costs, self.ranks, self.tolerance_percent = costs, ranks, tolerance_percent
        self.held = list(held)
        self.of_rank = [self.costs.rank(held) for held in self.held]

    @property
    def slowest(self) -> int:
        return max(self.of_rank)

    @property
    def is_even(self) -> bool:
        """Within the tolerance of the mean, or of the one group that no deal is faster than."""
        at_best = max(sum(self.of_rank), self.ranks * self.costs.longest)
        return self.slowest * self.ranks * 100 <= at_best * (100 + self.tolerance_percent)

    def run(self) -> None:
        """Whole groups change hands, or change places, first; where that no longer helps, groups are split."""
        for _ in range(MOST_STEPS * self.ranks):
            if self.is_even or not (self._improve(self._whole_groups) or self._improve(self._parts)):
                return

    def _improve(self, changes: Callable[[int, int], Iterator[tuple[Held, Held]]]) -> bool:
        """Make the best of some changes between the slowest rank and lighter ones; whether there was a good one."""
        slow = self.of_rank.index(self.slowest)
        lightest = sorted((cost, rank) for rank, cost in enumerate(self.of_rank) if rank != slow)[:TRIED_RANKS]
        best: tuple[int, Change] | None = None
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
        for group in _nearest([(self._alone(slow, group), group) for group in self.held[slow]], half):
            yield {group: self.held[slow][group]}, {}
        for group, responses in self.held[slow].items():
            wanted = self._alone(slow, group) - half
            if wanted <= 0:
                continue
            place = bisect_left(alone, (wanted, 0))
            for _, partner in alone[max(0, place - TRIED_PARTNERS) : place + TRIED_PARTNERS]:
                if partner != group:
                    yield {group: responses}, {partner: self.held[other][partner]}
        yield from self._clusters(slow)

    def _clusters(self, slow: int) -> Iterator[tuple[Held, Held]]:
        """All that the slow rank holds of a cluster, for nothing."""
        held = self.held[slow]
        for first in held:
            members = [group for group in self.costs.cluster[first] if group in held]
            if len(members) > 1 and members[0] == first:
                yield {group: held[group] for group in members}, {}

    def _parts(self, slow: int, other: int) -> Iterator[tuple[Held, Held]]:
        """Some responses of a group, so many that both ranks come out alike."""
        for group, responses in self.held[slow].items():
            there = self.held[other].get(group)
            if len(responses) < 2 and there is None:
                continue
            again = 0 if there is not None else self._added(other, {}, {group: ()})
            room = (self.of_rank[slow] - self.of_rank[other] - again) // 2
            chosen = self._filling(group, responses, room)
            if chosen:
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


def largest_first(costs: GroupCosts, ranks: int, part_percent: int = 100) -> list[Held]:
    """Clusters, or parts of those that a rank would be too slow with; each to the rank with least.

    Args:
        part_percent: how large parts are made, in percent of a rank's share.
    """
    whole = [costs.prefixes(members) + sum(sum(costs.responses[m]) for m in members) for members in costs.clusters]
    limit = _least_slowest(costs, ranks, whole) * part_percent // 100
    units: list[tuple[int, Held]] = []
    for cost, members in zip(whole, costs.clusters, strict=True):
        if cost <= limit:
            units.append((cost, {member: _all(costs, member) for member in members}))
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


def _all(costs: GroupCosts, group: int) -> tuple[int, ...]:
    return tuple(range(len(costs.responses[group])))


def whole_groups(costs: GroupCosts, dealt: Sequence[Sequence[int]]) -> list[Held]:
    """Each rank's groups with all their responses."""
    return [{group: _all(costs, group) for group in groups} for groups in dealt]


def keep_at_home(held: Sequence[Held], costs: GroupCosts) -> list[Held]:
    """The same parts, each at the rank that holds most of it already: fewest prompts and media to send around."""
    ranks = len(held)
    at_home = []
    for part, of_part in enumerate(held):
        kept = [0] * ranks
        for group in of_part:
            work = costs.groups[group]
            # What is sent of a group is its prompt: ids, and features of its media.
            kept[work.rank] += work.prompt_tokens
        at_home += [(-tokens, part, rank) for rank, tokens in enumerate(kept)]
    placed: dict[int, Held] = {}
    seen: set[int] = set()
    for _, part, rank in sorted(at_home):
        if part not in seen and rank not in placed:
            placed[rank] = held[part]
            seen.add(part)
    return [placed[rank] for rank in range(ranks)]


def _nearest(sized: Sequence[tuple[int, int]], wanted: int) -> list[int]:
    """Groups by how near their size is to what is wanted, the nearest first; as many as are worth trying."""
    by_distance = sorted((abs(size - wanted), size, group) for size, group in sized)
    return [group for _, _, group in by_distance[: 2 * TRIED_PARTNERS]]


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


@dataclass(order=True)
class _Part:
    """Items that go together; ordered by their sum, then their number, then the items themselves."""

    total: int
    count: int
    items: list[tuple[int, int]]

    def with_all(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.count + other.count, self.items + other.items)


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
    rows = []
    for start in range(0, len(values), parts):
        row = [_Part(value, 1, [(index, value)]) for value, index in ascending[start : start + parts]]
        rows.append(_entry(row))
    heapq.heapify(rows)
    while len(rows) > 1:
        one, other = heapq.heappop(rows)[-1], heapq.heappop(rows)[-1]
        heapq.heappush(rows, _entry([large.with_all(small) for large, small in zip(one, reversed(other), strict=True)]))
    return [sorted(index for index, _ in part.items) for part in rows[0][-1]]


def _entry(row: list[_Part]) -> tuple[int, tuple[int, int], list[tuple[int, int]], list[_Part]]:
    """For a heap that gives the largest difference first, and among equal ones the largest part."""
    descending = sorted(row, reverse=True)
    largest = descending[0]
    negative = [(-index, -value) for index, value in largest.items]
    return descending[-1].total - largest.total, (-largest.total, -largest.count), negative, descending
