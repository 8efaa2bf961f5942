"""Ours: ``RolloutEngine``, all groups together or one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import set_attention, text_prompt
from vlm_pg.bench.generation.case import Generate, GenerationCase
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings


@contextmanager
def _session(case: GenerationCase, all_at_once: bool) -> Iterator[Generate]:
    set_attention(case, ATTENTION_NAME)
    prompts = [text_prompt(f"bench {index}", ids) for index, ids in enumerate(case.prompts)]
    calls = [prompts] if all_at_once else [[prompt] for prompt in prompts]

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


together, one_by_one = partial(_session, all_at_once=True), partial(_session, all_at_once=False)
