"""Random batches of groups for the dealing of work, and verl's group-wise balancing to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vlm_pg.batching.cost import CostModel, GroupCosts, GroupWork

# About what training takes of Qwen2.5-VL-7B, -3B and a small model: operations of forward, backward, recomputation.
MODELS = (
    CostModel(token=4 * 13_000_000_000, pair=28 * 4 * 3584 * 4, logit=3 * 1_090_000_000),
    CostModel(token=4 * 5_500_000_000, pair=36 * 4 * 2048 * 4, logit=3 * 622_000_000),
    CostModel(token=3 * 5_000_000, pair=4 * 4 * 256 * 4, logit=3 * 2_100_000),
)


@dataclass(frozen=True)
class Batch:
    """What ``deal_groups`` takes."""

    groups: list[GroupWork]
    ranks: int
    budget: int
    model: CostModel
    videos: tuple[int, ...]
    common: tuple[int, ...]

    def shared(self, i: int, j: int) -> int:
        """Prompts on one video share all but their last tokens, everybody the system text."""
        if self.videos[i] == self.videos[j]:
            return min(self.common[i], self.common[j])
        return min(20, self.groups[i].prompt_tokens, self.groups[j].prompt_tokens)

    @property
    def costs(self) -> GroupCosts:
        return GroupCosts(self.groups, self.model, self.budget, self.shared)


def random_batch(seed: int, sizes: int = 16) -> Batch:
    """Lengths by Zipf's law, ``sizes`` of prompts and 64 of responses: the k-th shortest is drawn with a probability
    proportional to k ** -a, a from 0.8 to 1.2.

    2 to 64 ranks, 1 to 12 groups a rank (any number, or in half of the batches a multiple of the ranks), G from 1 to 32
    (in a quarter of the batches another one in each group, as pruning leaves it), 1 to 4 questions a video.
    """
    random = Random(seed)
    ranks = random.randint(2, 64)
    count = random.randint(1, 12) * ranks if random.random() < 0.5 else random.randint(1, 12 * ranks)
    prompt_exponent, response_exponent = random.uniform(0.8, 1.2), random.uniform(0.8, 1.2)
    prompt_step, response_step = random.choice((64, 256, 1024)), random.choice((4, 16, 32))
    generations, ragged = random.randint(1, 32), random.random() < 0.25
    model = random.choice(MODELS)
    lengths = zipf(random, prompt_exponent, count, sizes)
    videos: list[int] = []
    while len(videos) < count:
        videos += [len(videos)] * random.choice((1, 1, 1, 1, 2, 3, 4))
    groups, common = [], []
    for place in range(count):
        first = videos[place] if videos[place] < count else place
        video = prompt_step * lengths[first]
        own = random.randint(20, 120)
        size = random.randint(1, generations) if ragged else generations
        responses = tuple(response_step * k - 1 for k in zipf(random, response_exponent, size))
        groups.append(GroupWork(video + own, responses, str(first), rank=place * ranks // count))
        common.append(video)
    budget = max(work.prompt_tokens + max(work.responses) for work in groups) + random.choice((0, 4096, 20480))
    return Batch(groups, ranks, budget, model, tuple(videos[:count]), tuple(common))


def zipf(random: Random, exponent: float, count: int, sizes: int = 64) -> list[int]:
    """Draws from 1 to ``sizes``, of which k has probability proportional to ``k ** -exponent``."""
    weights = [k**-exponent for k in range(1, sizes + 1)]
    return random.choices(range(1, sizes + 1), weights, k=count)


def verl_deal(groups: Sequence[GroupWork], ranks: int) -> list[list[int]] | None:
    """Groups of each rank as verl's group-wise balancing deals them; None where it accepts no such batch.

    By its published behaviour (``get_group_balanced_partitions`` in verl/utils/seqlen_balancing.py): whole groups,
    equally many for each rank, at least one; a sequence of L tokens counts 24576 L + L ** 2, a group the sum over its
    sequences, prefixes repeated; partitions by the method of Karmarkar and Karp.
    """
    if not groups or len(groups) % ranks:
        return None
    work = []
    for group in groups:
        lengths = [group.prompt_tokens + tokens + 1 for tokens in group.responses]
        work.append(sum(24576 * length + length * length for length in lengths))
    # A part is its sum, the number of its groups, and they with their work: so parts are compared.
    order = sorted((work[index], index) for index in range(len(groups)))
    rows = [
        [(size, 1, [(index, size)]) for size, index in order[start : start + ranks]]
        for start in range(0, len(order), ranks)
    ]
    while len(rows) > 1:
        rows.sort(key=lambda row: (max(row)[0] - min(row)[0], max(row)))
        one, other = sorted(rows.pop(), reverse=True), sorted(rows.pop())
        rows.append([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(one, other, strict=True)])
    return [[index for index, _ in items] for _, _, items in sorted(rows[0], reverse=True)]


def slowest_of(batch: Batch, dealt: Sequence[Sequence[int]]) -> int:
    """The slowest rank's cost of whole groups dealt so, by our own estimate."""
    costs = batch.costs
    return max(
        costs.rank({group: range(len(batch.groups[group].responses)) for group in sorted(chosen)}) for chosen in dealt
    )
