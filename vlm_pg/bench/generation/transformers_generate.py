"""transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlm_pg.bench.case import best_attention, set_attention
from vlm_pg.bench.generation.case import Generate, GenerationCase


@contextmanager
def session(case: GenerationCase) -> Iterator[Generate]:
    from transformers import GenerationConfig

    set_attention(case, best_attention(case))
    last = case.policy.vocab_size - 1

    def generate(new_tokens: int) -> torch.Tensor:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=last, pad_token_id=last)
        ids = case.prompts.to(case.device).repeat_interleave(case.generations, dim=0)
        # Without a mask, generate would look for padding among the prompt's ids.
        out = case.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[:, ids.shape[1] :].cpu()

    yield generate
