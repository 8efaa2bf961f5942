"""Bytes of keys, values and states: costs of prompts and rollouts, the budget, which prompts fit together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        if not linear:
            return cls(per_token, 0)
        text = config.get_text_config()
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        conv_tail = (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * size
        # The recurrent state is fp32 whatever the weights are.
        recurrent = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim * 4
        return cls(per_token, linear * (conv_tail + recurrent))

    def prompts(self, tokens: int, nodes: int, settings: RolloutSettings, divided_by: int = 1) -> int:
        """For prompt tokens in so many nodes, on one of ``divided_by`` processes."""
        here = tokens
        if divided_by > 1:
            # Each pass is divided by itself, those of its rows that are read apart from the others.
            here = -(-tokens // divided_by) + 2 * -(-tokens // settings.prefill_tokens)
        return min(here, tokens) * self.per_token + nodes * self.per_state

    def rollout(self, settings: RolloutSettings) -> int:
        """For one rollout at its longest; room grows in blocks, and so it is booked."""
        blocks = -(-settings.max_new_tokens // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS * self.per_token + self.per_state


class Booking:
    """Bytes on one process for the nodes of a call's prompts and for rollouts at their longest.

    Args:
        divided_by: processes that each keep their part of the prompts.
    """

    def __init__(
        self, policy: Policy, settings: RolloutSettings, waiting: WaitingPrompts, decoder: Decoder, divided_by: int = 1
    ):
        self.waiting, self.decoder = waiting, decoder
        self._costs, self._settings, self._divided_by = TokenCosts.of(policy), settings, divided_by

    @classmethod
    def of(cls, policy: Policy, settings: RolloutSettings, prompts: Sequence[Prompt]) -> Booking:
        """Before a decoder exists."""
        decoder = decoder_for(policy, PrefixStore(), settings)
        return cls(policy, settings, WaitingPrompts(prompts, policy.settings.share_prefix), decoder)

    def bytes_of(self, nodes: Iterable[int], rollouts: int) -> int:
        """For these nodes and so many rollouts at their longest."""
        found = list(nodes)
        tokens = self.decoder.prompt_room(sum(self.waiting.nodes[node].num_tokens for node in found))
        prompts = self._costs.prompts(tokens, len(found), self._settings, self._divided_by)
        return prompts + self.decoder.rows_for(rollouts) * self._costs.rollout(self._settings)


class Round(NamedTuple):
    """Indices of prompts that are admitted together, and whether their keys and values are divided."""

    places: list[int]
    divided: bool


def rounds(
    policy: Policy, settings: RolloutSettings, prompts: Sequence[Prompt], budget: int, sequence: SequenceGroup
) -> Iterator[Round]:
    """Prompts to admit together, the same on all processes of ``sequence``; at least one at a time.

    With ``rollout.divide_prefix=auto`` those prompts are divided that do not fit whole.
    """
    whole = Booking.of(policy, settings, prompts)
    parts = Booking(policy, settings, whole.waiting, whole.decoder, sequence.size)
    # Rollouts of one prompt on the process that samples most of them.
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


def budget_bytes(settings: RolloutSettings, device: torch.device, kept: int = 0) -> int:
    """Bytes for keys, values and states: ``rollout.memory_gb``, else a share of the free memory.

    ``kept``: bytes that the last call has left for the next one, which are not free.
    """
    if settings.memory_gb is not None:
        return int(settings.memory_gb * GIB)
    return int(SHARE_OF_FREE * (free_bytes(device) + kept))


def check_fits(needed: int, budget: int, sample_id: str, settings: RolloutSettings, advice: str = "") -> None:
    """Raise ConfigError if one group alone goes beyond the budget. ``advice``: another remedy."""
    if needed > budget:
        gib = needed / GIB
        digits = max(0, 2 - math.floor(math.log10(gib)))
        enough = math.ceil(gib * 10**digits) / 10**digits  # three digits, rounded up
        raise ConfigError(
            f"One group needs {gib:.3g} GiB for keys and values ({settings.num_generations} rollouts of up to "
            f"{settings.max_new_tokens} tokens behind the prompt of sample {sample_id}), but generation may take "
            f"{budget / GIB:.3g} GiB. Raise rollout.memory_gb to at least {enough:.{digits}f}, or lower "
            f"rollout.num_generations, rollout.max_new_tokens or the media's size{advice}."
        )
