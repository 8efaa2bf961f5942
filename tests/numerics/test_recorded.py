"""Updates that start from the forward of sampling: log-probabilities to the bit, gradients of a forward made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
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
    make_case,
    plain_model,
    tiny_policy,
    weighted_sum,
)
from tests.support.tiny import FAMILY_NAMES, TEXT_FAMILY_NAMES, VL_FAMILY_NAMES, tiny_model
from tests.support.training import make_groups
from vlm_pg.models import contexts
from vlm_pg.models.micro_batches import backward_in_chunks, plan_groups
from vlm_pg.models.offloading import FileOnDisk
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import prompt_tree
from vlm_pg.models.recorded import ForwardBudget, RouterHook, hook_routers
from vlm_pg.models.settings import LoraSettings
from vlm_pg.models.stream_memory import MemoryChoice
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
    options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": STOPS} | settings
    chosen = RolloutSettings(num_generations=count, **options)
    engine = RolloutEngine(policy, chosen, seed, forwards=[ForwardBudget(2**31, policy.recorded_bytes())])
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


@pytest.mark.parametrize(
    ("family", "tile_rows"), [*product(("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_moe"), (0,)), ("qwen3_vl_moe", 5)]
)
def test_chunks_have_the_gradients_of_one_pass(family: str, tile_rows: int) -> None:
    policy = tiny_policy(train_vision=family in VL_FAMILY_NAMES, family=family, gradient_checkpointing=True)
    policy.train()
    policy.use_memory(MemoryChoice(mlp_tile_rows=tile_rows))
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


@pytest.mark.parametrize(("family", "lora"), list(product(("qwen2_5_vl", "qwen3_5"), (False, True))))
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


@pytest.mark.parametrize(("family", "tile_rows"), [("qwen3_vl_moe", 0), ("qwen3_5_moe", 0), ("qwen3_vl_moe", 7)])
def test_an_update_has_the_experts_of_sampling(family: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by layer and expert, where routers would choose others meanwhile; tiles run twice in an update."""
    policy = tiny_policy(family=family, dtype=torch.bfloat16, gradient_checkpointing=True)
    policy.train()
    policy.use_memory(MemoryChoice(mlp_tile_rows=tile_rows))
    layers = policy.language_model.layers
    hook_routers(policy.language_model)
    chosen = {"sampling": torch.zeros(len(layers), 4), "update": torch.zeros(len(layers), 4)}
    monkeypatch.setattr("vlm_pg.rollout.engine.COMPACT_THRESHOLD", 1.0)  # no idle rows
    phase, differing = "sampling", 0
    for index, layer in enumerate(layers):

        def count(gate: Any, given: Any, found: Any, index: int = index) -> None:
            chosen[phase][index] += torch.bincount(found[2].flatten(), minlength=4)

        layer.mlp.gate.register_forward_hook(count)
    cases = MAKERS[1](policy, np.random.default_rng(1)) + MAKERS[0](policy, np.random.default_rng(2))
    groups = groups_of(cases, sampled(policy, cases, 8))
    usual = RouterHook.__call__

    def call(hook: RouterHook, router: Any, inputs: Any, outputs: Any) -> Any:
        nonlocal differing
        found = usual(hook, router, inputs, outputs)
        differing += int((found[2].sort().values != outputs[2].sort().values).any(-1).sum())
        own = outputs[0].softmax(-1, dtype=torch.float).gather(-1, found[2])
        assert (found[1] - own / own.sum(-1, keepdim=True)).abs().max() < 1e-2
        return found

    monkeypatch.setattr(RouterHook, "__call__", call)
    phase = "update"
    with torch.no_grad():
        for layer in layers:
            layer.mlp.gate.weight.neg_()
    weighted_sum(policy.logprobs(groups)).backward()
    assert torch.equal(chosen["update"], (2 if tile_rows else 1) * chosen["sampling"])
    assert differing > 0.5 * chosen["update"].sum() / 2


COUNTED = ("segments_forward", "dense_forward", "ragged_forward")


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_token_passes_forward_once_in_rollout_and_once_in_update(
    family: str, chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are rows of each layer's MLP, key projection and linear attention, and calls of attention's kernels.

    Chunks need a prompt's keys, values and linear-attention states before its layers run: these are computed twice."""
    policy = tiny_policy(family=family, gradient_checkpointing=True)
    policy.train()
    layers, rows, kernel_calls = policy.language_model.layers, Counter[tuple[str, int]](), 0
    mixers = {id(layer.linear_attn): index for index, layer in enumerate(layers) if hasattr(layer, "linear_attn")}

    def count(name: str, index: int) -> Any:
        return lambda module, given: rows.update({(name, index): given[0].shape[1]})

    for index, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(count("mlp", index))
        if index not in mixers.values():
            layer.self_attn.k_proj.register_forward_pre_hook(count("keys", index))

    def counted(usual: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal kernel_calls
            kernel_calls += 1
            return usual(*args)

        return call

    for name in COUNTED:
        monkeypatch.setattr(type(policy.kernel), name, counted(getattr(type(policy.kernel), name)))
    mixed = contexts.linear_attention_over_tree

    def mix(mixer: Any, hidden: torch.Tensor, *args: Any) -> Any:
        rows["linear", mixers[id(mixer)]] += len(hidden)
        return mixed(mixer, hidden, *args)

    monkeypatch.setattr(contexts, "linear_attention_over_tree", mix)
    monkeypatch.setattr("vlm_pg.rollout.engine.COMPACT_THRESHOLD", 1.0)  # no idle rows
    cases = [make_case(policy, "video", 1)]
    groups = groups_of(cases, sampled(policy, cases, 5))
    prompt, own = cases[0].prompt.num_tokens, sum(len(response) - 1 for response in groups[0].responses)
    last, attending = len(layers) - 1, set(range(len(layers))) - set(mixers.values())

    def expected(more: int = 0) -> dict[tuple[str, int], int]:
        everything = {("mlp", index): prompt + own for index in range(len(layers))}
        if last in attending:
            everything["mlp", last] = 1 + own  # rows that are read
        everything |= {("keys", index): prompt + own + more for index in attending}
        return everything | {("linear", index): prompt + own + more for index in mixers.values()}

    in_rollout = {key: count for key, count in rows.items() if key[0] != "linear"}  # decode steps have their own rule
    assert in_rollout == {key: count for key, count in expected().items() if key[0] != "linear"}
    assert kernel_calls > 0
    rows.clear()
    kernel_calls = 0
    backward_in_chunks(policy, groups, chunk_loss, chunk_tokens)
    assert rows == expected(0 if chunk_tokens is None else prompt)
    assert kernel_calls == 0

    rows.clear()
    backward_in_chunks(policy, [replace(group, forwards=()) for group in groups], chunk_loss, chunk_tokens)
    assert kernel_calls > 0
    assert rows["mlp", 0] == 2 * (prompt + own), "a forward and its recomputation"


def test_memory_is_booked_by_prompt_and_streams_are_recorded_as_a_whole() -> None:
    """Two of four prompts find room, and are in a micro-batch of their own."""
    policy = tiny_policy(family="qwen2_5_vl")
    cases = [make_case(policy, "text", seed=seed) for seed in range(4)]
    settings = RolloutSettings(num_generations=2, max_new_tokens=9)
    budget = ForwardBudget(2 * (max(case.prompt.num_tokens for case in cases) + 2 * 9), 1)
    engine = RolloutEngine(policy, settings, 0, forwards=[budget])
    answers = engine.generate([case.prompt for case in cases], 1)
    groups = make_groups(policy, [(case.prompt, rollouts) for case, rollouts in zip(cases, answers, strict=True)])
    recorded = [bool(group.response_group.forwards) for group in groups]
    assert sum(recorded) == 2
    plan = plan_groups(groups, 10_000, share=True)
    assert [{recorded[index] for index in micro.groups} for micro in plan.micro_batches] == [{True}, {False}]
    assert sorted(index for micro in plan.micro_batches for index in micro.groups) == [0, 1, 2, 3]
    held = {id(rows): rows for group in groups for forward in group.response_group.forwards for rows in forward.prompt}
    assert budget.used > sum(rows.nbytes for rows in held.values()) > 0
    for group in groups:
        group.release_forwards()
    del held, answers
    assert budget.used == 0


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5"])
def test_offloaded_forwards_are_those_on_the_device(family: str, tmp_path: Path) -> None:
    policy = tiny_policy(family=family)
    cases = [make_case(policy, "text", seed=seed) for seed in range(3)]
    settings = RolloutSettings(num_generations=3, max_new_tokens=9, stop_token_ids=STOPS)
    found = []
    for target in (None, FileOnDisk(tmp_path)):
        budgets = [ForwardBudget(1, 1), ForwardBudget(2**31, policy.recorded_bytes(), target)]
        engine = RolloutEngine(policy, settings, 0, forwards=budgets)
        groups = groups_of(cases, engine.generate([case.prompt for case in cases], 1))
        assert budgets[0].used == 0 < budgets[1].used
        kept = [x for one in groups[0].forwards for rows in (*one.prompt, *one.own) for x in rows.tensors.values()]
        assert all(isinstance(x, torch.Tensor) is (target is None) for x in kept)
        found.append(outcome_of(policy, groups, chunk_tokens=12))
    device, offloaded = found
    assert device.keys() == offloaded.keys()
    assert all(torch.equal(device[name], offloaded[name]) for name in device)


def adapter_of(rng: np.random.Generator, family: str) -> LoraSettings:
    modules = ("q_proj", "o_proj") if "moe" in family else ("q_proj", "v_proj", "down_proj")
    return LoraSettings(rank=int(rng.integers(1, 6)), target_modules=modules)


def start_adapter(policy: Policy, rng: np.random.Generator) -> None:
    """B is zero at first, and A had no gradient."""
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02, generator=torch.Generator().manual_seed(int(rng.integers(2**31))))


def merged_model(policy: Policy) -> Any:
    """As ``plain_model``, with an adapter added to the weights, which all have gradients then."""
    if (lora := policy.settings.lora) is None:
        return plain_model(policy)
    state, scale = policy.model.state_dict(), lora.alpha / lora.rank
    merged = {name.replace(".base_layer", ""): x.clone() for name, x in state.items() if "lora_" not in name}
    for name, down in state.items():
        if "lora_A" in name:
            merged[name.replace(".lora_A.default", "")] += scale * state[name.replace("lora_A", "lora_B")] @ down
    model = tiny_model(policy.family.model_type).to(policy.dtype)
    model.load_state_dict(merged)
    model.set_attn_implementation("sdpa")
    return model


def gradients_of(policy: Policy, oracle: Any) -> dict[str, torch.Tensor]:
    """The oracle's, of the policy's weights: dA = s B^T dW and dB = s dW A^T for W + s B A."""
    found = {name: x.grad for name, x in oracle.named_parameters() if x.grad is not None}
    if (lora := policy.settings.lora) is None:
        return found
    state, scale, of_adapter = policy.model.state_dict(), lora.alpha / lora.rank, {}
    for name, down in state.items():
        if "lora_A" in name:
            up, of_weight = name.replace("lora_A", "lora_B"), found[name.replace(".lora_A.default", "")]
            of_adapter |= {name: scale * state[up].T @ of_weight, up: scale * of_weight @ down.T}
    return of_adapter


def outcome_of(policy: Policy, groups: list[ResponseGroup], **how: Any) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    backward_in_chunks(policy, groups, chunk_loss, **how)
    policy.weights_changed()
    return {name: x.grad.clone() for name, x in policy.model.named_parameters() if x.grad is not None}


def random_policy(rng: np.random.Generator, family: str, dtype: torch.dtype = torch.float32) -> Policy:
    lora = adapter_of(rng, family) if rng.random() < 0.25 else None
    policy = tiny_policy(
        train_vision=lora is None and family in VL_FAMILY_NAMES and rng.random() < 0.5,
        family=family,
        dtype=dtype,
        gradient_checkpointing=bool(rng.random() < 0.5),
        lora=lora,
    )
    start_adapter(policy, rng)
    policy.train()
    return policy


def random_sampling(rng: np.random.Generator) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 14)), "count": int(rng.integers(2, 9))}
    for name, value in {
        "temperature": float(rng.uniform(0.6, 1.3)),
        "top_p": float(rng.uniform(0.5, 1.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "prefill_tokens": 64,
        "max_batch_rollouts": int(rng.integers(8, 12)),
    }.items():
        if rng.random() < 0.4:
            settings[name] = value
    return settings


# 163: chunks behind linear-attention layers below the first weight of an adapter.
USUAL_CASES = (*range(8), 163)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.matrix] * (number not in USUAL_CASES)) for number in range(200)]
)
def test_random_groups_and_trees(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all weights equal those of a forward made anew and of transformers' repeated forward."""
    rng = np.random.default_rng([number, 41])
    policy = random_policy(rng, FAMILY_NAMES[number % len(FAMILY_NAMES)])
    if rng.random() < 0.5:
        monkeypatch.setattr("vlm_pg.models.packing.prompt_tree", partial(prompt_tree, min_shared=1))
    if rng.random() < 0.5:
        split_steps(monkeypatch)
    settings = random_sampling(rng)
    cases = MAKERS[int(rng.integers(len(MAKERS)))](policy, rng)
    groups = groups_of(cases, sampled(policy, cases, seed=number, **settings))
    chunk_tokens = int(rng.integers(1, 20)) if rng.random() < 0.5 else None
    how = {"chunk_tokens": chunk_tokens, "temperature": settings.get("temperature", 1.0)}
    recorded = outcome_of(policy, groups, **how)
    computed = outcome_of(policy, [replace(group, forwards=()) for group in groups], **how)
    oracle = merged_model(policy)
    repeated = policy_logprobs(oracle, cases, groups, how["temperature"])
    chunk_loss([list(enumerate(of_group)) for of_group in repeated]).backward()
    assert recorded.keys() == computed.keys()
    for name, expected in (("computed", computed), ("transformers", gradients_of(policy, oracle))):
        errors = {
            key: float((recorded[key] - expected[key]).norm() / expected[key].norm().clamp_min(1e-12))
            for key in recorded
        }
        print(f"WORST {name} {max(errors.values()):.3e} {max(errors, key=errors.__getitem__)}")
        assert max(errors.values()) < 1e-4, (name, max(errors.items(), key=lambda item: item[1]), settings, how)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_random_groups_in_bf16(family: str) -> None:
    """Summed over cases, no further from the fp32 gradient than a forward made anew."""
    squares = {"recorded": 0.0, "computed": 0.0}
    for number in range(10):
        rng = np.random.default_rng([number, 43])
        policy = random_policy(rng, family, torch.bfloat16)
        state = {name: x.float() for name, x in policy.model.state_dict().items()}
        exact = tiny_policy(family=family, train=policy.settings.train, lora=policy.settings.lora)
        exact.model.load_state_dict(state)
        settings = random_sampling(rng)
        cases = MAKERS[int(rng.integers(len(MAKERS)))](policy, rng)
        groups = groups_of(cases, sampled(policy, cases, seed=number, **settings))
        again = [replace(group, forwards=()) for group in groups]
        how = {"chunk_tokens": 15 if number % 2 else None, "temperature": settings.get("temperature", 1.0)}
        truth = outcome_of(exact, again, **how)
        size = sum(float(x.double().square().sum()) for x in truth.values())
        for name, given in (("recorded", groups), ("computed", again)):
            found = outcome_of(policy, given, **how)
            squares[name] += sum(float((found[key].double() - x).square().sum()) for key, x in truth.items()) / size
    print(f"BF16 {family} recorded {squares['recorded'] ** 0.5:.5f} computed {squares['computed'] ** 0.5:.5f}")
    assert squares["recorded"] <= 1.05**2 * squares["computed"], squares


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "dtype"), list(product(FAMILY_NAMES, (torch.float32, torch.bfloat16))))
def test_a_thousand_rollouts_have_the_log_probabilities_of_sampling(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family=family, dtype=dtype, gradient_checkpointing=True)
    policy.train()
    count, number = 0, 0
    while count < 1000:
        settings = SAMPLING[number % len(SAMPLING)]
        cases = MAKERS[number % len(MAKERS)](policy, np.random.default_rng([number, 45]))
        rollouts = sampled(policy, cases, 6 if "max_batch_rollouts" in settings else 40, number, **settings)
        logprobs = policy.logprobs(groups_of(cases, rollouts), temperature=settings.get("temperature", 1.0))
        for ours, of_case in zip(logprobs, rollouts, strict=True):
            assert all(torch.equal(one, rollout.rollout_logprobs) for one, rollout in zip(ours, of_case, strict=True))
            count += len(of_case)
        number += 1
