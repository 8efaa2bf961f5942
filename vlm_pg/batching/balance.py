"""Work dealt over data ranks so that all take about as long: groups whole where that balances, else some of them split.

A group that is split pays its prefix once more on every further rank, so this is done only where the slowest rank gains
by it. Rewards and advantages are computed on whole groups before, and loss weights over all ranks: the deal
cannot change the gradient. Pure and in whole numbers: every rank that knows the same sizes finds the same deal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlm_pg.batching.cost import CostModel, GroupCosts, GroupWork
from vlm_pg.batching.deal_search import Search, equal_counts, keep_at_home, largest_first, whole_groups
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
class Deal:
    """The groups and responses that each rank computes.

    ``pieces``: of each rank, groups ascending; every response exactly once. ``costs``: estimated, of each rank.
    ``whole_cost``: of all groups on one rank, nothing split: what splitting and parting questions on one video add is
    ``sum(costs) - whole_cost``.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    costs: tuple[int, ...]
    whole_cost: int

    @property
    def spread(self) -> float:
        """The slowest rank's cost over the mean of all; 1.0 is perfect balance."""
        return max(self.costs) * len(self.costs) / sum(self.costs) if sum(self.costs) else 1.0

    @property
    def spread_of_whole(self) -> float:
        """The slowest rank's cost over what each would have if everything could be divided at no cost."""
        return max(self.costs) * len(self.costs) / self.whole_cost if self.whole_cost else 1.0

    @property
    def split_groups(self) -> int:
        """How many groups are on more than one rank."""
        ranks_of: dict[int, int] = {}
        for piece in (piece for of_rank in self.pieces for piece in of_rank):
            ranks_of[piece.group] = ranks_of.get(piece.group, 0) + 1
        return sum(count > 1 for count in ranks_of.values())

    def metrics(self) -> dict[Metric, float]:
        """For the log; the same on all ranks."""
        total, slowest, ranks = sum(self.costs), max(self.costs), len(self.costs)
        found = {
            COST_SPREAD: self.spread,
            IDLE_SHARE: 1.0 - total / (slowest * ranks) if slowest else 0.0,
            SPLIT_GROUPS: float(self.split_groups),
            ADDED_WORK: total / self.whole_cost - 1.0 if self.whole_cost else 0.0,
        }
        for rank, cost in enumerate(self.costs):
            found[RANK_COST.of(str(rank))] = cost / total if total else 0.0
            found[RANK_IDLE.of(str(rank))] = 1.0 - cost / slowest if slowest else 0.0
        return found


def deal_groups(
    groups: Sequence[GroupWork],
    ranks: int,
    token_budget: int,
    model: CostModel,
    shared: Shared = lambda i, j: 0,
    tolerance_percent: int = TOLERANCE_PERCENT,
) -> Deal:
    """Deal groups over ``ranks`` data ranks.

    Any number of groups, of responses and of ranks; a rank may get nothing. Prompts that share much stay on one rank
    as far as balance allows. Ranks keep what they hold already as far as the deal leaves that open.

    Args:
        groups: the same list on every rank.
        token_budget: most tokens of a pass, see ``plan_micro_batches``.
        shared: (i, j) -> tokens that prompts i and j share where they stand in one micro-batch; called with i < j.
        tolerance_percent: groups stay whole where the slowest rank is so little above the mean.

    Raises:
        ValueError: no rank, a group held by a rank there is not, or a group without responses.

    Example: ``deal_groups([GroupWork(10, (5, 5)), GroupWork(10, (5, 5))], 2, 100, CostModel(1, 0))`` gives each rank
    one group.
    """
    _check(groups, ranks)
    costs = GroupCosts(groups, model, token_budget, shared)
    search = min(_searches(costs, ranks, tolerance_percent), key=lambda found: found.slowest)
    pieces = keep_at_home(search.held, costs)
    return Deal(
        tuple(tuple(Piece(group, of_rank[group]) for group in sorted(of_rank)) for of_rank in pieces),
        tuple(costs.rank(of_rank) for of_rank in pieces),
        costs.rank({group: tuple(range(len(work.responses))) for group, work in enumerate(groups)}),
    )


def _searches(costs: GroupCosts, ranks: int, tolerance_percent: int) -> Iterator[Search]:
    """From several beginnings, until one leads to a deal within the tolerance."""
    for part_percent in PART_PERCENTS:
        search = Search(costs, ranks, tolerance_percent, largest_first(costs, ranks, part_percent))
        search.run()
        yield search
        if search.is_even:
            break
    if costs.groups and len(costs.groups) % ranks == 0:
        # Equally many groups each, by the tokens that they would have if every prefix were repeated: what others
        # balance by. Seldom the better start; it guarantees a slowest rank no slower than that balancing has.
        dealt = equal_counts([_repeated_work(work) for work in costs.groups], ranks)
        even = Search(costs, ranks, tolerance_percent, whole_groups(costs, dealt))
        if even.slowest < search.slowest:
            even.run()
            yield even


def _repeated_work(group: GroupWork) -> int:
    """Of a group whose prefix is repeated for every response: verl's ``calculate_workload``, summed over it.

    A sequence of L tokens counts 24576 L + L ** 2, operations of a model of hidden size 4096.
    """
    lengths = [group.prompt_tokens + tokens + 1 for tokens in group.responses]
    return sum(24576 * length + length**2 for length in lengths)


def _check(groups: Sequence[GroupWork], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"Work was to be dealt over {ranks} ranks; it takes at least 1.")
    for index, group in enumerate(groups):
        if not group.responses:
            raise ValueError(f"Group {index} has no response, so there is nothing to compute. Leave it out.")
        if not 0 <= group.rank < ranks:
            raise ValueError(
                f"Group {index} is held by rank {group.rank}, but there are {ranks} ranks. Pass ranks from 0 to "
                f"{ranks - 1}."
            )
