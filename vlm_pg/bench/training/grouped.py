"""Ours: the loop of training, the prefix once and the responses behind it, all in one pass or in chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import set_attention, text_prompt
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.bench.work import CHUNK_TOKENS
from vlm_pg.distributed import BY_ITSELF, SequenceGroup
from vlm_pg.models.micro_batches import backward_in_chunks, pack_micro_batch, pass_logprobs
from vlm_pg.models.reference import AdapterFreeReference
from vlm_pg.types import ResponseGroup


def _step(case: TrainingCase, chunk_tokens: int | None, sequence: SequenceGroup = BY_ITSELF) -> float:
    set_attention(case, ATTENTION_NAME)

    def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        indexes, logprobs = zip(*chunk[0], strict=True)
        return case.loss(logprobs, indexes)

    return backward_in_chunks(case.policy, [_group(case)], loss_of, chunk_tokens, sequence=sequence).item()


def scored(case: TrainingCase) -> float:
    """The forward of a reference: log-probabilities of all responses, the prefix once, no gradient, no adapter."""
    set_attention(case, ATTENTION_NAME)
    policy: Any = case.policy
    reference = AdapterFreeReference(policy) if policy.settings.lora is not None else policy
    with torch.no_grad():
        streams = pack_micro_batch(policy, [_group(case)])
        (logprobs,) = pass_logprobs(reference, streams, None, temperature=1.0)
    return logprobs.sum().item()


def _group(case: TrainingCase) -> ResponseGroup:
    return ResponseGroup(text_prompt("bench", case.prefix.cpu()), tuple(r.cpu() for r in case.responses))


whole, chunked = partial(_step, chunk_tokens=None), partial(_step, chunk_tokens=CHUNK_TOKENS)
