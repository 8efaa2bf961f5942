"""How much memory keys, values and states take, and how much they may take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, free_bytes
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decoders import Decoder, decoder_for
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
from vlm_pg.rollout.settings import SHARE_OF_FREE, RolloutSettings
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt


@dataclass(frozen=True)
class TokenCosts:
    """Bytes that generation keeps: per token of a prompt or a response, and per node or rollout (linear layers)."""

    per_token: int
    per_state: int

    @classmethod
    def of(cls, policy: Policy) -> TokenCosts:
        config, size = policy.model.config, policy.dtype.itemsize
        kinds = policy.family.layer_kinds(config)
        linear = kinds.count("linear_attention")
        _, kv_heads, head_dim = policy.family.head_shape(config)
        per_token = 2 * kv_heads * head_dim * size * (len(kinds) - linear)
        return cls(per_token, linear * _state_bytes(config.get_text_config(), size) if linear else 0)

    def prompts(self, tokens: int, nodes: int, settings: RolloutSettings, divided_by: int = 1) -> int:
        """Of so many tokens of prompts in so many nodes; what one of ``divided_by`` processes holds of them."""
        here = tokens
        if divided_by > 1:
            # Each pass is divided by itself, those of its rows that are read apart from the others.
            here = -(-tokens // divided_by) + 2 * -(-tokens // settings.prefill_tokens)
        return min(here, tokens) * self.per_token + nodes * self.per_state

    def rollout(self, settings: RolloutSettings) -> int:
        """Of one rollout at its longest; room grows in blocks, so that is how it is booked."""
        blocks = -(-settings.max_new_tokens // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS * self.per_token + self.per_state


def _state_bytes(text: Any, size: int) -> int:
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    tail = (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * size
    # The recurrent state is fp32 whatever the weights are.
    return tail + text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim * 4


def budget_bytes(settings: RolloutSettings, device: torch.device, kept: int = 0) -> int:
    """What keys, values and states may take: as the settings say, else a share of what is free now.

    ``kept``: bytes that the last call has left for the next one, which are not free.
    """
    if settings.memory_gb is not None:
        return int(settings.memory_gb * GIB)
    return int(SHARE_OF_FREE * (free_bytes(device) + kept))


def check_fits(needed: int, budget: int, sample_id: str, settings: RolloutSettings, advice: str = "") -> None:
    """Raise ConfigError if one group alone goes beyond the budget. ``advice``: what else would help."""
    if needed > budget:
        raise ConfigError(
            f"One group needs {needed / GIB:.3g} GiB for keys and values ({settings.num_generations} rollouts of up to "
            f"{settings.max_new_tokens} tokens behind the prompt of sample {sample_id}), but generation may take "
            f"{budget / GIB:.3g} GiB. Raise rollout.memory_gb to at least {_rounded_up(needed / GIB)}, or lower "
            f"rollout.num_generations, rollout.max_new_tokens or the media's size{advice}."
        )


def _rounded_up(gib: float) -> str:
    """Three digits that are enough."""
    digits = max(0, 2 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"


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
