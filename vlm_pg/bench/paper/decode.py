"""One decoded token of a group, as a GPU would be asked for it, and the least that it could be.

G rollouts, P prompt tokens, R response tokens so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vlm_pg.bench.case import text_prompt
from vlm_pg.bench.paper.counter import count
from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.generation import decoding_as_on_cuda
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import RolloutEngine, _ContinuousBatch
from vlm_pg.rollout.memory import TokenCosts
from vlm_pg.rollout.settings import RolloutSettings

# Enough for keys and values of any size: what is counted takes no memory.
_MEMORY_GB = 1e6


@dataclass(frozen=True)
class DecodeCounts:
    """``prefill``: of the prompt, once. ``step``: of one more token for every rollout, from logits to hidden states."""

    prefill: Counts
    step: Counts


@torch.no_grad()
def count_decoding(
    policy: Policy, fakes: FakeTensorMode, prefix: int, generations: int, response: int, longest: int
) -> DecodeCounts:
    """The engine's own prefill and step, with rows of one batch, as on CUDA; the step without a graph around it.

    Args:
        policy: on ``fakes``, with the kernel and its ``multiprocessors`` that a GPU would have.
        prefix: P.
        generations: G.
        response: R, tokens that each rollout has when the next one is sampled; less than ``longest``, and not so many
            that the next one needs more room (``room_for``).
        longest: of a response, which room is made for.
    """
    settings = RolloutSettings(num_generations=generations, max_new_tokens=longest, memory_gb=_MEMORY_GB)
    settings = settings.model_copy(update={"max_batch_rollouts": max(generations, settings.max_batch_rollouts)})
    engine = RolloutEngine(policy, settings, seed=0)
    with decoding_as_on_cuda():
        batch = _ContinuousBatch(engine, [text_prompt("counted", torch.zeros(prefix, dtype=torch.int64))], 0)
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


def least_step_bytes(policy: Policy, prefix: int, generations: int, response: int) -> int:
    """What nobody gets around: each weight and each key and value read once, the new ones and the logits written.

    States of linear-attention layers are read and written. Of the embedding one row a rollout is read, unless its
    weights are the output head's too. Tokens of a response are ``response`` old ones and the one whose hidden state is
    computed.
    """
    model = policy.model
    text = [*policy.language_model.parameters(), *model.lm_head.parameters()]
    weights = {id(weight): weight for weight in text}
    embedding = policy.language_model.embed_tokens.weight
    if embedding is not model.lm_head.weight:
        del weights[id(embedding)]
    read = sum(weight.nbytes for weight in weights.values()) + generations * embedding[0].nbytes
    costs = TokenCosts.of(policy)
    keys_values = costs.per_token * (prefix + generations * (response + 1)) + 2 * generations * costs.per_state
    logits = generations * policy.vocab_size * policy.dtype.itemsize
    return read + keys_values + logits
