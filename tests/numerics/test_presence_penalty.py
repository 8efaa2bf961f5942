"""Answers under a presence penalty are those of a plain loop over transformers' logits, whatever else is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.test_rollout import count_calls, engine, ragged_stops
from tests.support.groups import Case, make_case, plain_model, positions_4P, tiny_policy
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decoding import Cohort
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.sampling import rollout_key, uniforms

STEP, SEED, TOKENS = 4, 7, 24  # of ``engine``
PENALTY = 1.7
KINDS = ("text", "video", "image", "text")


def logits_behind(policy: Policy, oracle: Any, case: Case, tokens: Sequence[int]) -> torch.Tensor:
    """fp32 [V]: transformers' logits of the next token, from a whole forward over prompt and answer."""
    more = torch.tensor([tokens], dtype=torch.int64)
    inputs = {name: value for name, value in case.inputs.items() if name != "video_metadata"}
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
    for name in ("attention_mask", "mm_token_type_ids"):
        if name in inputs:
            fill = torch.full_like(more, 1 if name == "attention_mask" else 0)
            inputs[name] = torch.cat([inputs[name], fill], dim=1)
    if policy.family.reads_media:
        inputs["position_ids"] = positions_4P(case.prompt, len(tokens))
    with torch.no_grad():
        return oracle(**inputs).logits[0, -1].float()


def by_hand(
    policy: Policy, oracle: Any, case: Case, index: int, stops: Sequence[int], temperature: float, penalty: float
) -> list[int]:
    """One answer, a token at a time, with nothing kept between tokens."""
    key = rollout_key(SEED, STEP, case.prompt.sample_id, index)
    numbers = uniforms([key], TOKENS)[0]
    tokens: list[int] = []
    while len(tokens) < TOKENS and (not tokens or tokens[-1] not in stops):
        logits = logits_behind(policy, oracle, case, tokens)
        for token in set(tokens):
            logits[token] -= penalty
        logits[list(policy.media_token_ids)] = -torch.inf
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        probabilities = np.exp((logits.double() / temperature).numpy())
        cumulative = probabilities.cumsum() / probabilities.sum()
        tokens.append(int((cumulative <= numbers[len(tokens)]).sum()))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("decoder", [None, RaggedDecoder], ids=["cohorts", "ragged"])
def test_the_penalty_is_that_of_a_plain_loop(
    decoder: type | None, family: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(family=family)
    stops = ragged_stops(policy)
    oracle = plain_model(policy)
    cases = [make_case(policy, kind, seed=40 + number) for number, kind in enumerate(KINDS)]
    if decoder is not None:
        monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", decoder)
    evicted = count_calls(monkeypatch, Cohort, "evict_finished")
    sampler = engine(policy, num_generations=2, temperature=temperature, presence_penalty=PENALTY, max_batch_rollouts=4)
    found = sampler.generate([case.prompt for case in cases], step=STEP)
    # Rows have moved between tensors, entered late and left early.
    assert sampler.stats.cohorts > 1 and (evicted or temperature == 0.0)
    changed = 0
    for case, rollouts in zip(cases, found, strict=True):
        for index, rollout in enumerate(rollouts):
            tokens = rollout.token_ids.tolist()
            assert tokens == by_hand(policy, oracle, case, index, stops, temperature, PENALTY)
            changed += tokens != by_hand(policy, oracle, case, index, stops, temperature, 0.0)
    assert changed, "the penalty should have changed an answer"


def test_the_policys_own_log_probabilities_know_no_penalty() -> None:
    """As with the repetition penalty: what training computes again is beside what was drawn from."""
    policy = tiny_policy()
    case = make_case(policy, "text", seed=40)
    oracle = plain_model(policy)
    sampler = engine(policy, num_generations=1, presence_penalty=PENALTY, temperature=0.8)
    ((rollout,),) = sampler.generate([case.prompt], step=STEP)
    tokens = rollout.token_ids.tolist()
    penalized = 0
    for index, token in enumerate(tokens):
        plain = logits_behind(policy, oracle, case, tokens[:index]) / 0.8
        assert abs(rollout.rollout_logprobs[index] - plain.log_softmax(-1)[token]) < 1e-4
        own = plain.clone()
        own[list(set(tokens[:index]))] -= PENALTY / 0.8
        own[list(policy.media_token_ids)] = -torch.inf
        assert rollout.sampling_logprobs is not None
        assert abs(rollout.sampling_logprobs[index] - own.log_softmax(-1)[token]) < 1e-4
        penalized += abs(float(own.log_softmax(-1)[token] - plain.log_softmax(-1)[token])) > 1e-2
    assert penalized, "the two should have differed"
