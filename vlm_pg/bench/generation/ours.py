"""Ours: ``RolloutEngine``, all groups together or one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils.rnn import pad_sequence

from vlm_pg.attention.integration import ATTENTION_NAME
from vlm_pg.bench.contestants.base import set_attention
from vlm_pg.bench.generation.base import Generate, GenerationCase
from vlm_pg.bench.generation.work import ONE_BY_ONE, OURS
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt


class Ours:
    """``together``: all groups in one call of the engine."""

    def __init__(self, name: str, together: bool):
        self.name = name
        self.together = together

    def unavailable_because(self, device: torch.device) -> str | None:
        return None

    @contextmanager
    def session(self, case: GenerationCase) -> Iterator[Generate]:
        set_attention(case, ATTENTION_NAME)
        prompts = [_prompt(index, ids) for index, ids in enumerate(case.prompts)]
        calls = [prompts] if self.together else [[prompt] for prompt in prompts]

        def generate(new_tokens: int) -> torch.Tensor:
            settings = RolloutSettings(
                num_generations=case.generations,
                max_new_tokens=new_tokens,
                temperature=0.0,
                max_batch_rollouts=case.rollouts,
            )
            engine = RolloutEngine(case.policy, settings, seed=0)
            groups = [group for call in calls for group in engine.generate(call, step=0)]
            rows = [rollout.token_ids for group in groups for rollout in group]
            # A response that ended early is filled with the last special token, which `check_count` refuses.
            return pad_sequence(rows, batch_first=True, padding_value=case.policy.vocab_size - 1)

        yield generate


def _prompt(index: int, ids: torch.Tensor) -> Prompt:
    return Prompt(f"bench {index}", ids, torch.zeros_like(ids), torch.arange(len(ids)).expand(3, -1))


TOGETHER, SEPARATE = Ours(OURS, together=True), Ours(ONE_BY_ONE, together=False)
