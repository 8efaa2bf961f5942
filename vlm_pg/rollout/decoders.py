"""Decode steps of the running rollouts: cohort by cohort (CPU), or as the rows of one ragged batch (CUDA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort import Cohort, OwnTokens
from vlm_pg.rollout.fused.choice import FusedStep
from vlm_pg.rollout.graphs import GraphUse
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step
from vlm_pg.rollout.prefix_attention import LevelPrefixAttention, PrefixAttention
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings


class Decoder(Protocol):
    """The decode steps of one ``generate`` call. Rollouts are ordered by cohort, as admitted, then by row.

    ``fused``: whether Triton kernels replace small operations.
    """

    store: PrefixStore
    graphs: GraphUse
    fused: FusedStep

    def rows_for(self, rollouts: int) -> int:
        """Rows of keys and values that so many rollouts take."""
        ...

    def prompt_room(self, tokens: int) -> int:
        """Tokens allocated for so many prompt tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        ...

    def reset(self) -> bool:
        """End a call; whether the next one may reuse the buffers and recorded steps."""
        ...

    def is_current(self) -> bool:
        """Whether weights and settings are where they were when ``reset`` was called."""
        ...

    def admit(self, cohort: Cohort) -> None:
        """Add a cohort; the store has been rearranged for it."""
        ...

    def let_go(self, cohort: Cohort, rows: Sequence[int]) -> None:
        """Keep only these of the cohort's former rows (none: the cohort has ended); ``cohort`` has dropped its own."""
        ...

    def rows(self) -> list[tuple[int, ...]]:
        """Rows of the next step: the stored nodes of each one's prompt, none for an idle row. ``step`` must follow."""
        ...

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rollouts, D] of the tokens sampled last, int64 [rollouts], at these rotary positions."""
        ...


def decoder_for(
    policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: PrefixAttention | None = None
) -> Decoder:
    """On CUDA few large calls win, and the ragged batch makes them; on a CPU dense blocks do.

    Args:
        prompts: attention to the prompts; None: they are all in ``store``.
    """
    if policy.device.type == "cuda":
        return RaggedDecoder(policy, store, settings, prompts)
    return CohortDecoder(policy, store, settings, prompts)


class DecodeContext:
    """One new token for each rollout: attention to its own tokens, cohort by cohort, merged with that to its prompt.

    Args:
        owns: the rollouts, in the order of the stream.
        prompts: attention to the prompts; None: they are all in ``store``.
    """

    def __init__(
        self, store: PrefixStore, owns: Sequence[OwnTokens], kernel: Kernel, prompts: PrefixAttention | None = None
    ):
        self._store, self._owns, self._kernel = store, list(owns), kernel
        self._sizes = [len(own.paths) for own in owns]
        self._prompts = prompts or LevelPrefixAttention(store, [path for own in owns for path in own.paths], kernel)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        of_cohorts = zip(self._owns, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True)
        parts = [
            self._kernel.dense_forward(one_q[:, None], *own.append(layer_index, one_k, one_v), scale)
            for own, one_q, one_k, one_v in of_cohorts
        ]
        lse = torch.cat([part_lse[:, :, 0] for _, part_lse in parts]).transpose(0, 1).contiguous()
        merged = torch.cat([part[:, 0] for part, _ in parts]).to(lse.dtype)
        self._prompts.merge_into(layer_index, q, merged, lse, scale)
        return merged.to(q.dtype)

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rollouts, D] of the new tokens -> [rollouts, D]."""
        before = [own.states(layer_index, self._store) for own in self._owns]
        tails, recurrent = [states.conv_tail for states in before], [states.recurrent for states in before]
        out, after = linear_attention_step(mixer, hidden, LinearStates(torch.cat(tails), torch.cat(recurrent)))
        parts = zip(after.conv_tail.split(self._sizes), after.recurrent.split(self._sizes), strict=True)
        for own, (tail, state) in zip(self._owns, parts, strict=True):
            # Copies where there are several: a view would keep the states of all alive.
            if len(self._owns) > 1:
                tail, state = tail.clone(), state.clone()
            own.set_states(layer_index, LinearStates(tail, state))
        return out


class CohortDecoder:
    """A ``Decoder`` with one dense block of own keys and values, and one attention call, for each cohort."""

    fused = FusedStep("torch")
    nbytes = 0

    def __init__(
        self, policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: PrefixAttention | None = None
    ):
        self.graphs = GraphUse.of(policy, settings, prompts is not None)
        self._policy, self.store, self._prompts = policy, store, prompts
        self._owns: list[OwnTokens] = []
        self._context: DecodeContext | None = None

    def rows_for(self, rollouts: int) -> int:
        return rollouts

    def prompt_room(self, tokens: int) -> int:
        return tokens

    def reset(self) -> bool:
        return False

    def is_current(self) -> bool:
        return False

    def admit(self, cohort: Cohort) -> None:
        self._owns.append(cohort.own)
        self._context = None

    def let_go(self, cohort: Cohort, rows: Sequence[int]) -> None:
        if not rows:
            self._owns.remove(cohort.own)
        self._context = None

    def rows(self) -> list[tuple[int, ...]]:
        return [path for own in self._owns for path in own.paths]

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._context is None:
            self._context = DecodeContext(self.store, self._owns, self._policy.kernel, self._prompts)
        hidden = self._policy.hidden_states(tokens, positions.expand(3, -1), self._context)
        for own in self._owns:
            own.length += 1
        return hidden
