"""The decode step of every family can be recorded as a CUDA graph: on fake CUDA tensors nothing in it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from scripts.bench.operations import NO_KERNEL
from tests.support.fake_cuda import CUDA, GuardedMemory, on_fake_cuda, stored_prompts
from tests.support.groups import tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import linear_step, ragged
from vlm_pg.rollout.cohort import Cohort
from vlm_pg.rollout.graphs import GraphMemory
from vlm_pg.rollout.linear_step import DeltaRule
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings

TORCH = DeltaRule("torch", linear_step.gated_delta_step_)


TWO_PROMPTS = ((0, 1),) * 3 + ((0, 2),) * 2


def recorded_step(
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    rule: DeltaRule = TORCH,
    fused: bool = False,
    paths: Sequence[tuple[int, ...]] = TWO_PROMPTS,
    within: Callable[[Policy], AbstractContextManager[Any]] = nullcontext,
) -> list[str]:
    """Operators of the step in which five rollouts behind two prompts are recorded; three of eight rows are idle."""
    monkeypatch.setattr(ragged, "rule_of", lambda _: rule)
    with on_fake_cuda(policy, monkeypatch, fused), within(policy):
        store = stored_prompts(policy, {0: 70, 1: 9, 2: 3})
        decoder = RaggedDecoder(policy, store, RolloutSettings(max_new_tokens=50))
        assert decoder.graphs.off_because is None
        positions, uniforms = torch.full((5,), 79, device=CUDA), torch.empty(5, 50, device=CUDA)
        cohort = Cohort([(0, row) for row in range(5)], paths, torch.empty(5, 1), positions, uniforms, None)
        decoder.admit(cohort)
        for _ in range(3):
            cohort.num_generated += 1
            hidden = decoder.step(torch.zeros(5, dtype=torch.int64, device=CUDA), cohort.positions)
        assert (decoder.graphs.captures, decoder.graphs.replays) == (1, 2)
        assert (hidden.shape[0], hidden.device, hidden.dtype) == (5, CUDA, torch.bfloat16)
    return GuardedMemory.operators


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_nothing_waits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family, dtype=torch.bfloat16)
    operators = recorded_step(policy, monkeypatch)
    kinds = policy.family.layer_kinds(policy.model.config)
    # Of each layer its own tokens, the common prompt and the questions; one flash call each.
    assert operators.count("aten::_flash_attention_forward") == 3 * kinds.count("full_attention")
    assert operators.count("aten::addcmul_") == kinds.count("linear_attention")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_nothing_waits_in_fused_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    policy = tiny_policy(family=family, dtype=torch.bfloat16)
    before = [vars(module).get("forward") for module in policy.model.modules()]
    operators = recorded_step(policy, monkeypatch, fused=True)
    kinds = policy.family.layer_kinds(policy.model.config)
    full, moe = kinds.count("full_attention"), policy.family.moe
    names = ("rms_norm", "add_norm", "rotate_append", "own_attention", "merge_parts", "silu_mul")
    found = {name: operators.count(f"vlm_pg::{name}") for name in names}
    # Two levels of prompts. Mixtures have gates of their own, and Qwen3.5's one for all rows beside them.
    gates = found.pop("silu_mul")
    expected = {"rms_norm": 1, "add_norm": 2 * len(kinds), "rotate_append": full, "own_attention": full}
    assert found == expected | {"merge_parts": 2 * full}
    assert gates == (0 if moe and "qwen3_5" not in family else len(kinds))
    assert [vars(module).get("forward") for module in policy.model.modules()] == before


PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm"}
# Kernels of a layer with attention beside its products: queries, keys and values put where they are read, attention to
# own tokens and to the prompt, both merged, two sums with norms, and a gate.
LAYER = ["rotate_append", "own_attention", "merge_parts", "add_norm", "add_norm", "silu_mul"]
# Qwen3.5's attention has a gate of its own; mixtures route, and sort rows by expert.
MORE = {"qwen3_5": 3, "qwen3_5_text": 3} | dict.fromkeys(("qwen3_vl_moe", "qwen3_moe"), 19)
MORE |= dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), 26)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_kernels_of_a_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last, as the difference to a model without it; behind prompts that share nothing."""
    pytest.importorskip("triton")
    found = []
    for without in (0, 1):
        policy = tiny_policy(family=family, dtype=torch.bfloat16)
        kinds, model = policy.family.layer_kinds(policy.model.config), policy.language_model
        assert kinds[-1] == "full_attention"
        model.layers = model.layers[: len(kinds) - without]
        operators = recorded_step(policy, monkeypatch, fused=True, paths=((0,), (0,), (1,), (1,), (1,)))
        found.append(Counter(name for name in operators if name.split("::")[1] not in NO_KERNEL))
    of_layer = found[0] - found[1]
    products = [of_layer.pop(name, 0) for name in PRODUCTS]
    assert of_layer.pop("aten::_flash_attention_forward") == 1
    if family not in MORE:
        assert sorted(of_layer.elements()) == sorted(f"vlm_pg::{name}" for name in LAYER)
        assert sum(products) == 4, "with queries, keys and values as one, and gate and up"
    else:
        assert len(list(of_layer.elements())) <= len(LAYER) + MORE[family]


def test_the_triton_kernel_is_one_operator_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vlm_pg.rollout.fused.delta_rule import gated_delta_step_

    policy = tiny_policy(family="qwen3_5", dtype=torch.bfloat16)
    operators = recorded_step(policy, monkeypatch, DeltaRule("triton", gated_delta_step_))
    assert operators.count("vlm_pg::gated_delta_step_") == 3 and "aten::addcmul_" not in operators


def looks(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    if float(parts[-1].max()) > 0.5:
        return linear_step.gated_delta_step_(state, *parts)
    return parts[2].float()


def chooses(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    rows = parts[-1].amax(1) > 0.5
    state[rows] = 0.5 * state[rows]
    return parts[2].float()


def asks_the_host(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    return linear_step.gated_delta_step_(state, *parts) * torch.tensor([0.5], device=state.device)


def is_elsewhere(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    return linear_step.gated_delta_step_(state, *parts).cpu().to(state.device)


@pytest.mark.parametrize("rule_step_", [looks, chooses, asks_the_host, is_elsewhere])
def test_what_waits_is_found(rule_step_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family="qwen3_5", dtype=torch.bfloat16)
    with pytest.raises((AssertionError, RuntimeError)) as found:
        recorded_step(policy, monkeypatch, DeltaRule("other", rule_step_))
    assert any(
        word in f"{type(found.value)} {found.value}"
        for word in ("waits", "has a tensor on", "DataDependent", "DynamicOutput")
    ), found.value


def test_experts_in_a_loop_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family="qwen3_5_moe", dtype=torch.bfloat16)
    policy.model.set_experts_implementation("eager")
    monkeypatch.setattr("vlm_pg.rollout.graphs.experts_wait", lambda _: None)
    with pytest.raises((AssertionError, RuntimeError), match="nonzero"):
        recorded_step(policy, monkeypatch)


def test_what_cannot_be_recorded_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's advice on how to find the cause comes behind it."""
    cuda: Any = MagicMock()
    cuda.graph.return_value.__enter__.side_effect = RuntimeError("operation not permitted\nCUDA kernel errors might")
    monkeypatch.setattr(torch, "cuda", cuda)
    with pytest.raises(RuntimeError) as raised:
        GraphMemory(CUDA).capture(lambda: None)
    first, advice = str(raised.value).split("\n")
    assert first.endswith("CUDA graph: operation not permitted. Set rollout.cuda_graphs=false.")
    assert advice == "CUDA kernel errors might"
