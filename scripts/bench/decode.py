"""One decoded token of a group, as a GPU runs it; G rollouts, P prompt tokens, R response tokens so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.bench.counting import Counts, count, replaced
from vlm_pg.bench.case import text_prompt
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import engine
from vlm_pg.rollout.fused.choice import prefill_unchecked
from vlm_pg.rollout.ragged import RaggedDecoder, StepOperators
from vlm_pg.rollout.settings import RolloutSettings

# Enough for keys and values of any size: fake tensors take no memory.
_MEMORY_GB = 1e6


@dataclass(frozen=True)
class DecodeCounts:
    """``prefill``: of the prompt, once. ``step``: of one more token for every rollout, from logits to hidden states."""

    prefill: Counts
    step: Counts


@contextmanager
def decoding_as_on_cuda() -> Iterator[None]:
    """Rollouts are rows of one ragged batch, on fused kernels, as on a GPU, also where fake tensors are a CPU's."""

    def as_on_cuda(policy: Any, store: Any, settings: Any, prompts: Any = None) -> Any:
        return RaggedDecoder(policy, store, settings, prompts, StepOperators.on_cuda(policy))

    with replaced(engine, decoder_for=as_on_cuda, prefill_layers=lambda policy, _: prefill_unchecked(policy)):
        yield


@torch.no_grad()
def count_decoding(
    policy: Policy, fakes: FakeTensorMode, prefix: int, generations: int, response: int, longest: int
) -> DecodeCounts:
    """The engine's own prefill and step, with rows of one batch, as on CUDA; the step without a graph around it.

    Args:
        policy: on ``fakes``, with a GPU's kernel and its ``multiprocessors``.
        prefix: P.
        generations: G.
        response: R, tokens that each rollout has when the next one is sampled; less than ``longest``, and not so many
            that the next one needs more room (``room_for``).
        longest: of a response, which room is made for.
    """
    settings = RolloutSettings(num_generations=generations, max_new_tokens=longest, memory_gb=_MEMORY_GB)
    settings = settings.model_copy(update={"max_batch_rollouts": max(generations, settings.max_batch_rollouts)})
    rollouts = engine.RolloutEngine(policy, settings, seed=0)
    with decoding_as_on_cuda():
        prompt = text_prompt("counted", torch.zeros(prefix, dtype=torch.int64))
        batch = engine._ContinuousBatch(rollouts, [prompt], 0)
    prefill = count(batch._admit, fakes)
    (cohort,) = batch.cohorts
    # One step makes the rows' room, the next finds it.
    cohort.num_generated = response - 1

    def step() -> None:
        batch._sample()
        batch._evict_finished(1.0)
        batch._forward()

    count(step, fakes)
    return DecodeCounts(prefill, count(step, fakes))
