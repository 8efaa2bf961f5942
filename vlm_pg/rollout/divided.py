"""Prompts whose keys and values lie in parts on several processes, and decoding behind them.

Each process decodes rollouts of its own, and has of every prompt the keys and values of some tokens. In a layer all
queries go to all processes; each attends with them to what it has, and sends every process the results for its
rollouts, which are merged by their log-sum-exp with one another and with the rollouts' own tokens. So processes make
their steps together, and one without rollouts goes on answering until nobody has any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_pg.attention.grouped import merge_
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort_attention import PromptPart, Prompts
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefix_levels import PrefixLevels


class DividedPrompts:
    """``Prompts`` of all processes' rows over the tokens that lie here, exchanged and merged.

    Args:
        store: of this process: its part of every node.
    """

    def __init__(self, store: PrefixStore, policy: Policy, sequence: SequenceGroup):
        self._store, self._kernel, self._sequence = store, policy.kernel, sequence
        heads = policy.family.head_shape(policy.model.config)[:2]
        self._query_heads = heads[0]
        on_gpu = policy.device.type == "cuda"
        self._levels = PrefixLevels(store, policy.kernel, heads, policy.device) if on_gpu else None
        self._rows: list[list[tuple[int, ...]]] = [[] for _ in range(sequence.size)]
        self._own: list[tuple[int, ...]] = []
        self._everybody: Prompts = PromptPart(store, (), policy.kernel)

    def meet(self, rows: Sequence[tuple[int, ...]], stop: bool) -> bool:
        """Before each step, on all processes: what rows each of them has in it.

        Args:
            rows: this process's, the stored nodes of each one's prompt.
            stop: whether this process was asked to stop.

        Returns:
            Whether anybody has any.

        Raises:
            InterruptedError: on all of them, if one was asked to stop.
        """
        changed = list(rows) != self._own
        self._own = list(rows)
        of_ranks = self._sequence.gather((self._own if changed else None, stop))
        if any(stops for _, stops in of_ranks):
            raise InterruptedError("generation was asked to stop")
        if any(paths is not None for paths, _ in of_ranks):
            self._rows = [
                before if paths is None else paths for before, (paths, _) in zip(self._rows, of_ranks, strict=True)
            ]
            everybody = [path for of_rank in self._rows for path in of_rank]
            if self._levels is not None:
                self._levels.arrange(everybody)
            self._everybody = self._levels or PromptPart(self._store, everybody, self._kernel)
        return any(self._rows)

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """As ``PromptPart``; q are the rows that this process has told of."""
        sizes, own = [len(of_rank) for of_rank in self._rows], q.shape[0]
        asking = self._sequence.collect(q, sizes)
        # Over no keys: nothing, with no weight.
        out = asking.new_zeros(asking.shape, dtype=lse.dtype)
        out_lse = lse.new_full((asking.shape[1], asking.shape[0]), -torch.inf)
        self._everybody.merge_into(layer_index, asking, out, out_lse, scale)
        sent = torch.cat([out, out_lse.transpose(0, 1)[..., None]], dim=-1)
        received = self._sequence.send(sent, sizes, [own] * self._sequence.size)
        for part in received.split([own] * self._sequence.size) if own else ():
            merge_(merged, lse, part[..., :-1], part[..., -1].transpose(0, 1))

    def answer(self) -> None:
        """The step of a process without rows: what the others ask of it in each layer."""
        for layer_index in sorted(self._store.keys):
            keys = self._store.keys[layer_index]
            q = keys.new_empty(0, self._query_heads, keys.shape[-1])
            wide = torch.promote_types(keys.dtype, torch.float32)
            lse = torch.empty(self._query_heads, 0, dtype=wide, device=keys.device)
            self.merge_into(layer_index, q, q.to(wide), lse, self._store.scales[layer_index])
