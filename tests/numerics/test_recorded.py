"""Updates that start from the forward of sampling: log-probabilities to the bit, gradients of a forward made anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.test_families import MAKERS, gradient_of
from tests.support.groups import (
    Case,
    batched_logprobs,
    chunk_loss,
    gradient_errors,
    plain_model,
    tiny_policy,
    weighted_sum,
)
from tests.support.tiny import TEXT_FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import ForwardBudget, RouterHook, recorded_bytes
from vlm_pg.models.settings import LoraSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.recording import StepRing
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup, Rollout

# Responses end early, at different lengths.
STOPS = tuple(range(5, 60))
# What a rollout may be sampled with, none of which changes the log-probabilities but the temperature.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    {"prefill_tokens": 64, "top_k": 20},
    {"max_batch_rollouts": 6, "presence_penalty": 0.5},
)


def sampled(
    policy: Policy, cases: Sequence[Case], count: int = 4, seed: int = 0, **settings: Any
) -> list[list[Rollout]]:
    """Recorded rollouts of each case."""
    chosen = RolloutSettings(num_generations=count, max_new_tokens=9, stop_token_ids=STOPS, **settings)
    size = recorded_bytes(policy.family, policy.model.config, policy.dtype.itemsize)
    engine = RolloutEngine(policy, chosen, seed, forwards=ForwardBudget(2**31, size))
    return [list(rollouts) for rollouts in engine.generate([case.prompt for case in cases], 1)]


def split_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as on a GPU, with few steps in the ring."""
    monkeypatch.setattr(StepRing, "STEPS", 3)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", lambda *args: RaggedDecoder(*args))


def groups_of(cases: Sequence[Case], rollouts: Sequence[Sequence[Rollout]]) -> list[ResponseGroup]:
    forwards = [tuple(r.forward for r in of_case if r.forward is not None) for of_case in rollouts]
    assert [len(of_case) for of_case in forwards] == [len(of_case) for of_case in rollouts]
    return [
        ResponseGroup(case.prompt, tuple(r.token_ids for r in of_case), forward)
        for case, of_case, forward in zip(cases, rollouts, forwards, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [*((name, True) for name in VL_FAMILY_NAMES), *((name, False) for name in TEXT_FAMILY_NAMES)],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_are_those_of_transformers(
    family: str, train_vision: bool, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(train_vision=train_vision, family=family, gradient_checkpointing=True)
    policy.train()
    if ragged:
        split_steps(monkeypatch)
    oracle = plain_model(policy)
    for number, settings in enumerate(SAMPLING):
        cases = MAKERS[number](policy, np.random.default_rng([number, 7]))
        rollouts = sampled(policy, cases, seed=number, **settings)
        groups, temperature = groups_of(cases, rollouts), settings.get("temperature", 1.0)
        assert policy.pack(groups).recorded is not None
        logprobs = policy.logprobs(groups, temperature=temperature)
        for ours, of_case in zip(logprobs, rollouts, strict=True):
            assert all(torch.equal(one, rollout.rollout_logprobs) for one, rollout in zip(ours, of_case, strict=True))
        expected = policy_logprobs(oracle, cases, groups, temperature)
        weighted_sum(logprobs).backward()
        weighted_sum(expected).backward()
        policy.weights_changed()  # a trained tower's graph is used up
    errors = gradient_errors(policy.model, oracle)
    assert max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_moe"])
def test_chunks_have_the_gradients_of_one_pass(family: str) -> None:
    policy = tiny_policy(train_vision=family in VL_FAMILY_NAMES, family=family, gradient_checkpointing=True)
    policy.train()
    cases = MAKERS[1](policy, np.random.default_rng(3)) + MAKERS[0](policy, np.random.default_rng(4))
    groups = groups_of(cases, sampled(policy, cases, 5))
    found = {}
    for name, given, tokens in (("recorded", groups, 7), ("computed", [replace(g, forwards=()) for g in groups], None)):
        policy.zero_grad()
        backward_in_chunks(policy, given, chunk_loss, tokens)
        policy.weights_changed()
        found[name] = {key: x.grad.clone() for key, x in policy.named_parameters() if x.grad is not None}
    assert found["recorded"].keys() == found["computed"].keys()
    for key, gradient in found["computed"].items():
        assert (found["recorded"][key] - gradient).norm() < 1e-4 * gradient.norm(), key


def policy_logprobs(
    oracle: Any, cases: Sequence[Case], groups: Sequence[ResponseGroup], temperature: float
) -> list[list[torch.Tensor]]:
    head = oracle.lm_head.forward
    oracle.lm_head.forward = lambda hidden: head(hidden) / temperature
    try:
        return [batched_logprobs(oracle, case, group.responses) for case, group in zip(cases, groups, strict=True)]
    finally:
        oracle.lm_head.forward = head


@pytest.mark.parametrize(("family", "lora"), product(("qwen2_5_vl", "qwen3_5"), (False, True)))
def test_gradients_in_bf16_are_as_near_to_the_truth(family: str, lora: bool) -> None:
    adapter = LoraSettings(rank=4, target_modules=("q_proj", "down_proj")) if lora else None
    policy = tiny_policy(family=family, dtype=torch.bfloat16, gradient_checkpointing=True, lora=adapter)
    exact = tiny_policy(family=family, lora=adapter)
    if lora:
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
    exact.model.load_state_dict({name: x.float() for name, x in policy.model.state_dict().items()}, strict=False)
    cases = MAKERS[0](policy, np.random.default_rng(5)) + MAKERS[1](policy, np.random.default_rng(6))
    groups = groups_of(cases, sampled(policy, cases, 8))
    found = {}
    for name, of, given in (
        ("recorded", policy, groups),
        ("computed", policy, [replace(group, forwards=()) for group in groups]),
        ("exact", exact, [replace(group, forwards=()) for group in groups]),
    ):
        of.zero_grad()
        weighted_sum(of.logprobs(given)).backward()
        found[name] = gradient_of(of.model)
    errors = {name: float((found[name] - found["exact"]).norm()) for name in ("recorded", "computed")}
    assert errors["recorded"] <= 1.2 * errors["computed"], errors


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_an_update_has_the_experts_of_sampling(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, where routers of other batches choose others now and then."""
    policy = tiny_policy(family=family, dtype=torch.bfloat16, gradient_checkpointing=True)
    policy.train()
    cases = MAKERS[1](policy, np.random.default_rng(1)) + MAKERS[0](policy, np.random.default_rng(2))
    groups = groups_of(cases, sampled(policy, cases, 8))
    seen, differing = [], 0
    usual = RouterHook.__call__

    def call(hook: RouterHook, router: Any, inputs: Any, outputs: Any) -> Any:
        nonlocal differing
        found = usual(hook, router, inputs, outputs)
        if hook.recorded is not None:
            seen.append(found[2])
            assert torch.equal(found[2], hook.recorded.routes(hook.layer_index, len(found[2])))
            differing += int((found[2].sort().values != outputs[2].sort().values).any(-1).sum())
            own = outputs[0].softmax(-1, dtype=torch.float).gather(-1, found[2])
            assert (found[1] - own / own.sum(-1, keepdim=True)).abs().max() < 1e-2
        return found

    monkeypatch.setattr(RouterHook, "__call__", call)
    weighted_sum(policy.logprobs(groups)).backward()
    layers = len(policy.language_model.layers)
    assert len(seen) == layers, "each layer runs once"
    print(family, differing, sum(map(len, seen)))
