"""What prompts and rollouts take of a process's memory, and which prompts several processes admit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decoders import Decoder, decoder_for
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.memory import TokenCosts, check_fits
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt


class Booking:
    """What the nodes of a call's prompts, and rollouts at their longest, take of one process's memory.

    Args:
        divided_by: processes that each keep their part of the prompts.
    """

    def __init__(
        self, policy: Policy, settings: RolloutSettings, waiting: WaitingPrompts, decoder: Decoder, divided_by: int = 1
    ):
        self.waiting, self._decoder = waiting, decoder
        self._costs, self._settings, self._divided_by = TokenCosts.of(policy), settings, divided_by

    @classmethod
    def of(cls, policy: Policy, settings: RolloutSettings, prompts: Sequence[Prompt]) -> Booking:
        """Before there is anything that decodes."""
        decoder = decoder_for(policy, PrefixStore(), settings)
        return cls(policy, settings, WaitingPrompts(prompts, policy.settings.share_prefix), decoder)

    def divided(self, by: int) -> Booking:
        """Of the same prompts, divided."""
        one = copy(self)
        one._divided_by = by
        return one

    def bytes_of(self, nodes: Iterable[int], rollouts: int) -> int:
        """Of these nodes and of so many rollouts at their longest."""
        found = list(nodes)
        tokens = self._decoder.prompt_room(sum(self.waiting.nodes[node].num_tokens for node in found))
        prompts = self._costs.prompts(tokens, len(found), self._settings, self._divided_by)
        return prompts + self._decoder.rows_for(rollouts) * self._costs.rollout(self._settings)


class Round(NamedTuple):
    """Places of prompts that are admitted together, and whether their keys and values are divided."""

    places: list[int]
    divided: bool


def rounds(
    policy: Policy, settings: RolloutSettings, prompts: Sequence[Prompt], budget: int, sequence: SequenceGroup
) -> Iterator[Round]:
    """Which prompts are admitted together, on all processes of ``sequence`` alike; at least one at a time.

    With ``rollout.divide_prefix=auto`` those prompts are divided that do not fit whole.
    """
    whole = Booking.of(policy, settings, prompts)
    parts = whole.divided(sequence.size)
    # Of the process that samples most of each.
    each = -(-settings.num_generations // sequence.size)
    divides = []
    for prompt, path in zip(prompts, whole.waiting.paths, strict=True):
        fits = whole.bytes_of(path, each) <= budget
        divides.append(settings.divide_prefix == "always" or (settings.divide_prefix == "auto" and not fits))
        needed = (parts if divides[-1] else whole).bytes_of(path, each)
        advice = ", or set rollout.divide_prefix=auto" if settings.divide_prefix == "never" else ""
        check_fits(needed, budget, prompt.sample_id, settings, advice)
    chosen: list[int] = []
    nodes: set[int] = set()
    for place in whole.waiting:
        rows, after = (len(chosen) + 1) * each, nodes.union(whole.waiting.paths[place])
        booking = parts if divides[place] else whole
        full = rows > settings.max_batch_rollouts or booking.bytes_of(after, rows) > budget
        if chosen and (full or divides[place] != divides[chosen[0]]):
            yield Round(chosen, divides[chosen[0]])
            chosen, after = [], set(whole.waiting.paths[place])
        chosen.append(place)
        nodes = after
    yield Round(chosen, divides[chosen[0]])
