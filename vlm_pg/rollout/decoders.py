"""How running rollouts are decoded: cohort by cohort, or as the rows of one ragged batch."""

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
from vlm_pg.rollout.prefix_attention import PromptPart, Prompts
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings


class Decoder(Protocol):
    """The decode steps of one ``generate`` call. Rollouts are ordered by cohort, as admitted, then by row."""

    store: PrefixStore
    graphs: GraphUse
    fused: FusedStep
    """Whether Triton's kernels stand for small operations."""

    def rows_for(self, rollouts: int) -> int:
        """Rows of keys and values that so many rollouts take."""
        ...

    def prompt_room(self, tokens: int) -> int:
        """Tokens that so many tokens of prompts take the room of."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        ...

    def reset(self) -> bool:
        """At the end of a call: whether the next one may go on with what this one has made."""
        ...

    def is_current(self) -> bool:
        """At the beginning of the next: whether weights and settings are where they were."""
        ...

    def admit(self, cohort: Cohort) -> None:
        """A cohort enters; the store has been rearranged for it."""
        ...

    def let_go(self, cohort: Cohort, rows: Sequence[int]) -> None:
        """Of its rows, as they were, only these go on; none: the cohort has ended. ``cohort`` has let go already."""
        ...

    def rows(self) -> list[tuple[int, ...]]:
        """Rows of the next step: the stored nodes of each one's prompt, none for an idle row. ``step`` must follow."""
        ...

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rollouts, D] of the tokens sampled last, int64 [rollouts], at these rotary positions."""
        ...


def decoder_for(
    policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: Prompts | None = None
) -> Decoder:
    """On CUDA few large calls win, and the ragged batch makes them; on a CPU dense blocks do.

    Args:
        prompts: what attends to the prompts; None: they all lie in ``store``.
    """
    if policy.device.type == "cuda":
        return RaggedDecoder(policy, store, settings, prompts)
    return CohortDecoder(policy, store, settings, prompts)


class CohortDecoder:
    """Each cohort's own keys and values are one dense block, attended to in one call a cohort."""

    fused = FusedStep("torch")

    def __init__(self, policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: Prompts | None = None):
        self.graphs = GraphUse.of(policy, settings, prompts is not None)
        self._policy = policy
        self.store, self._prompts = store, prompts
        self._owns: list[OwnTokens] = []
        self._context: DecodeContext | None = None

    def rows_for(self, rollouts: int) -> int:
        return rollouts

    def prompt_room(self, tokens: int) -> int:
        return tokens

    @property
    def nbytes(self) -> int:
        return 0

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


class DecodeContext:
    """One new token for each rollout: its own tokens, cohort by cohort, and its prompt's nodes, merged.

    Args:
        owns: the rollouts, in the order of the stream.
        prompts: what attends to the prompts; None: they all lie in ``store``.
    """

    def __init__(self, store: PrefixStore, owns: Sequence[OwnTokens], kernel: Kernel, prompts: Prompts | None = None):
        self._store = store
        self._owns = list(owns)
        self._sizes = [len(own.paths) for own in owns]
        self._kernel = kernel
        self._prompts = prompts or PromptPart(store, [path for own in owns for path in own.paths], kernel)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        parts = [
            self._kernel.dense_forward(one_q[:, None], *own.append(layer_index, one_k, one_v), scale)
            for own, one_q, one_k, one_v in zip(
                self._owns, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True
            )
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
