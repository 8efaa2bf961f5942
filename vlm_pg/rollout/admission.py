"""Which prompts enter next: their order by what they share, the bytes of keys, values and states, and the budget."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, free_bytes
from vlm_pg.models.memory_sizes import FP32, LanguageShape
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import PromptNode, prompt_tree
from vlm_pg.rollout.decoding import Decoder
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
from vlm_pg.rollout.ragged import decoder_for
from vlm_pg.rollout.settings import SHARE_OF_FREE, RolloutSettings
from vlm_pg.types import Prompt

# Finding what prompts share compares them in pairs.
COMPARED_TOGETHER = 128


class WaitingPrompts:
    """Prompts in the order in which they will be generated, and the nodes they pass through.

    Prompts that share a beginning follow each other, so that it can be freed early.

    ``nodes``: of all prompts; ``owner`` counts the prompts as they were given, and parents have smaller numbers.
    ``paths``: for each prompt its nodes from the beginning to its end. With ``share`` off that is one, its own.

    Args:
        check: raises for a prompt that cannot be generated from.
    """

    def __init__(self, prompts: Sequence[Prompt], share: bool = True, check: Callable[[Prompt], None] | None = None):
        if check is not None:
            for prompt in prompts:
                check(prompt)
        self.nodes: list[PromptNode] = []
        self.paths: list[tuple[int, ...]] = []
        order: list[int] = []
        for first in range(0, len(prompts), COMPARED_TOGETHER):
            tree = prompt_tree(prompts[first : first + COMPARED_TOGETHER], share)
            offset = len(self.nodes)
            for node in tree.nodes:
                parent = node.parent + offset if node.parent >= 0 else -1
                self.nodes.append(replace(node, parent=parent, owner=node.owner + first))
            paths = [self._path(end + offset) for end in tree.end_nodes]
            self.paths.extend(paths)
            # Depth first: prompts that pass through a node one after the other, in order of first appearance.
            first_prompt: dict[int, int] = {}
            for number, path in enumerate(paths):
                for end in path:
                    first_prompt.setdefault(end, number)
            keys = [[first_prompt[end] for end in path] for path in paths]
            order.extend(first + number for number in sorted(range(len(paths)), key=keys.__getitem__))
        self._order = deque(order)
        self._readers = Counter(node for path in self.paths for node in path)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def take(self, count: int) -> list[int]:
        """Remove the next ``count`` prompts from those that wait."""
        return [self._order.popleft() for _ in range(count)]

    def done(self, prompt: int) -> None:
        """All rollouts of this prompt are finished: it no longer needs its nodes."""
        self._readers.subtract(self.paths[prompt])

    def is_needed(self, node: int) -> bool:
        """Whether a prompt that waits or runs passes through this node."""
        return self._readers[node] > 0

    def _path(self, end: int) -> tuple[int, ...]:
        path: list[int] = []
        while end >= 0:
            path.append(end)
            end = self.nodes[end].parent
        return tuple(reversed(path))


@dataclass(frozen=True)
class TokenCosts:
    """Bytes that generation holds: per token of a prompt or a response, and per node or rollout (linear layers)."""

    per_token: int
    per_state: int

    @classmethod
    def of(cls, policy: Policy) -> TokenCosts:
        shape, size = LanguageShape.of(policy.family, policy.model.config), policy.dtype.itemsize
        per_token = 2 * shape.key_width * size * shape.full_layers
        if (linear := shape.linear) is None:
            return cls(per_token, 0)
        values = linear.value_heads * linear.value_dim
        conv_tail = (linear.conv_width - 1) * (2 * linear.key_heads * linear.key_dim + values) * size
        # The recurrent state is fp32 whatever the weights are.
        return cls(per_token, linear.layers * (conv_tail + values * linear.key_dim * FP32))

    def rollout(self, settings: RolloutSettings) -> int:
        """For one rollout at its longest; room grows in blocks, and so it is booked."""
        blocks = -(-settings.max_new_tokens // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS * self.per_token + self.per_state


class Booking:
    """Bytes on one process for the nodes of a call's prompts and for rollouts at their longest.

    Args:
        divided_by: processes that each hold their part of the prompts.
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
        booked = list(nodes)
        tokens = own = self.decoder.prompt_room(sum(self.waiting.nodes[node].num_tokens for node in booked))
        if self._divided_by > 1:
            # Each pass is divided by itself, those of its rows that are read apart from the others.
            own = -(-tokens // self._divided_by) + 2 * -(-tokens // self._settings.prefill_tokens)
        prompts = min(own, tokens) * self._costs.per_token + len(booked) * self._costs.per_state
        return prompts + self.decoder.rows_for(rollouts) * self._costs.rollout(self._settings)


def rounds(
    policy: Policy, settings: RolloutSettings, prompts: Sequence[Prompt], budget: int, sequence: SequenceGroup
) -> Iterator[tuple[list[int], bool]]:
    """Indices of prompts to admit together, the same on all processes of ``sequence``, at least one at a time; and
    whether their keys and values are divided.

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
    for index in whole.waiting:
        rows, after = (len(chosen) + 1) * each, nodes.union(whole.waiting.paths[index])
        booking = parts if divides[index] else whole
        full = rows > settings.max_batch_rollouts or booking.bytes_of(after, rows) > budget
        if chosen and (full or divides[index] != divides[chosen[0]]):
            yield chosen, divides[chosen[0]]
            chosen, after = [], set(whole.waiting.paths[index])
        chosen.append(index)
        nodes = after
    yield chosen, divides[chosen[0]]


def budget_bytes(settings: RolloutSettings, device: torch.device, reusable: int = 0) -> int:
    """Bytes for keys, values and states: ``rollout.memory_gb``, else a share of the free memory.

    ``reusable``: bytes of the last call's buffers, which are not free.
    """
    if settings.memory_gb is not None:
        return int(settings.memory_gb * GIB)
    return int(SHARE_OF_FREE * max(0, free_bytes(device) + reusable))


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
