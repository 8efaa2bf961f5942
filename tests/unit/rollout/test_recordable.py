"""Generation on a GPU that is not there: nothing in prefills and decode steps waits, so that a step can be recorded.

A CUDA graph holds kernels only. What would ask the device for a value, or copy between host and device, raises here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from scripts.bench.operations import NO_KERNEL
from tests.support.fake_cuda import CUDA, GuardedMemory, on_fake_cuda, stored_prompts
from tests.support.fakes import CPU, Strict, as_fake, fake_policy, faked, features_of, groups_of
from tests.support.groups import tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.models.policy import Policy, Rows
from vlm_pg.models.registry import FAMILIES
from vlm_pg.rollout import linear_step, ragged
from vlm_pg.rollout.admission import WaitingPrompts
from vlm_pg.rollout.decoding import Cohort
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.fused.choice import FusedStep, fused_unchecked
from vlm_pg.rollout.graphs import DecodeGraph, GraphMemory, GraphUse
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import DeltaRule
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.prefix_attention import SplitPrefixAttention
from vlm_pg.rollout.ragged import OwnRows, OwnStates, RaggedContext, RaggedDecoder
from vlm_pg.rollout.sampling import TokenSampler
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import VisualFeatures

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


FEW = ("qwen2_5_vl", "qwen3_5", "qwen3_vl_moe")
OF_FAMILIES = [name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILY_NAMES]


@pytest.mark.parametrize("family", OF_FAMILIES)
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


@pytest.mark.parametrize("family", OF_FAMILIES)
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


def reads_a_value(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    if float(parts[-1].max()) > 0.5:
        return linear_step.gated_delta_step_(state, *parts)
    return parts[2].float()


def chooses(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    rows = parts[-1].amax(1) > 0.5
    state[rows] = 0.5 * state[rows]
    return parts[2].float()


def copies_from_the_host(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    return linear_step.gated_delta_step_(state, *parts) * torch.tensor([0.5], device=state.device)


def is_elsewhere(state: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    return linear_step.gated_delta_step_(state, *parts).cpu().to(state.device)


@pytest.mark.parametrize("rule_step_", [reads_a_value, chooses, copies_from_the_host, is_elsewhere])
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


RAGGED = [name for name in FAMILY_NAMES if not FAMILIES[name].linear_attention]
ROWS = 8


class FakePrefill(Prefill):
    """What is put together on the host has values there, and none when it is sent to the device."""

    def _rows(self, *given: Any) -> Rows:
        with _disable_current_modes():
            rows = super()._rows(*given)
        on_host = {name: as_fake(x, CPU) for name, x in rows._asdict().items() if x is not None and x.device == CPU}
        return rows._replace(**on_host)

    def _has_media(self, node: int) -> bool:
        with _disable_current_modes():
            return super()._has_media(node)


def prefilled(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, budget: int, layers: AbstractContextManager[None] | None = None
) -> tuple[PrefixStore, WaitingPrompts]:
    """The prompts of ``groups_of`` through the model, in passes of ``budget`` tokens."""
    groups = groups_of(policy.family.model_type)
    prompts = [group.prompt for group in groups]
    with _disable_current_modes():
        waiting, store = WaitingPrompts(prompts), PrefixStore()
        visual = {prompt.sample_id: prompt.num_visual_tokens for prompt in prompts if prompt.num_visual_tokens}
    features = features_of(policy, groups, CUDA)
    if features is not None:
        parts = zip(visual, features.split(list(visual.values())), strict=True)
        of_prompt = {name: VisualFeatures(part, 0, False) for name, part in parts}
        monkeypatch.setattr(policy.vision, "encode", lambda prompts, **_: [of_prompt[p.sample_id] for p in prompts])
    nodes = range(len(waiting.nodes))
    store.rearrange((), {node: waiting.nodes[node].num_tokens for node in nodes})
    ends = {path[-1] for path in waiting.paths}
    prefill = FakePrefill(policy, store, waiting.nodes, prompts, budget, lambda: None, layers=layers)
    hidden = prefill.run(nodes, ends)
    assert hidden.keys() == ends
    width = policy.model.config.get_text_config().hidden_size
    for state in hidden.values():
        assert (state.shape[0], state.dtype, state.device) == (width, torch.bfloat16, CUDA)
    return store, waiting


def step_of(policy: Policy, strict: Strict, monkeypatch: pytest.MonkeyPatch, fused: FusedStep) -> DecodeGraph:
    """The step of 8 rows, one of them idle, behind the prompts of ``groups_of``; what is laid out before is there."""
    store, waiting = prefilled(policy, monkeypatch, 10_000)
    paths = [waiting.paths[question] for question in (0, 1, 2, 3, 0, 2, 2)] + [()]
    with strict.looking_away():
        own = OwnRows(CUDA, store.keys)
        own.move((), ROWS, 64)
        own.set_lengths(dict.fromkeys(range(7), 3))
        prompts = SplitPrefixAttention(store, policy.kernel, policy.family.head_shape(policy.model.config)[:2], CUDA)
        prompts.arrange(paths)
    context = RaggedContext(own, prompts, policy.kernel, OwnStates(CUDA), fused=fused)
    return DecodeGraph(policy, context, ROWS, None, GraphUse(), fused.deferred or fused.layers)


WHOLE, PIECES = 10_000, 24
PREFILLED = [("qwen2_5_vl", WHOLE), ("qwen2_5_vl", PIECES), ("qwen3_5", PIECES), ("qwen3_vl_moe", WHOLE)]
REST = [(name, size) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3")
        for size in (WHOLE, PIECES) if (name, size) not in PREFILLED]  # fmt: skip


@pytest.mark.parametrize(
    "family, budget", [*PREFILLED, *(pytest.param(*one, marks=pytest.mark.matrix) for one in REST)]
)
@torch.no_grad()
def test_prefill(family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with faked():
        policy = fake_policy(family, CUDA)
        store, _ = prefilled(policy, monkeypatch, budget)
        _, kv_heads, dim = policy.family.head_shape(policy.model.config)
        for stored in (*store.keys.values(), *store.values.values()):
            assert (stored.shape, stored.dtype) == ((sum(store.lengths.values()), kv_heads, dim), torch.bfloat16)
            assert stored.device == CUDA


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix)])
@torch.no_grad()
def test_a_prefill_runs_on_fused_norms_and_gates(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with faked() as strict:
        policy = fake_policy(family, CUDA)
        monkeypatch.setattr(choice, "judged", lambda *_: {"norms": "1 off"})
        judged = choice.prefill_layers(policy, RolloutSettings())
        off = choice.prefill_layers(policy, RolloutSettings(fused_kernels=False))
        every = choice.prefill_unchecked(policy)
        for layers, fused in ((judged, {"silu_mul"}), (off, set()), (every, {"silu_mul", "rms_norm"})):
            strict.seen.clear()
            prefilled(policy, monkeypatch, WHOLE, layers)
            assert strict.seen & {"silu_mul", "rms_norm", "rotate"} == fused


@torch.no_grad()
def test_rows_of_linear_layers_start_and_move_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows that close up: uploads do not block the host."""
    with faked() as strict:
        policy = fake_policy("qwen3_5", CUDA)
        store, waiting = prefilled(policy, monkeypatch, WHOLE)
        ends = [waiting.paths[question][-1] for question in (0, 1, 0, 2, 3, 3)]
        states, before = OwnStates(CUDA), strict.uploads
        states.move((), ROWS)
        states.start(range(6), ends, store)
        assert strict.uploads == before + 1, "one copy, whatever the number of nodes and layers"
        states.move((1, 3), 2)
        assert strict.uploads == before + 2
        for layer in store.states:
            inputs, recurrent = states[layer].inputs, states[layer].recurrent
            assert inputs.shape[0] == recurrent.shape[0] == 2 and inputs.device == recurrent.device == CUDA
            assert (inputs.dtype, recurrent.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.matrix) for name in RAGGED if name != "qwen3_vl")]
)
@torch.no_grad()
def test_a_step_can_be_captured(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        pytest.importorskip("triton")
    with faked() as strict:
        policy = fake_policy(family, CUDA)
        step = step_of(policy, strict, monkeypatch, fused_unchecked(policy) if fused else FusedStep("torch"))
        step._forward()  # as before a capture: what is made once for these rows is made here
        strict.captured = True
        step._forward()
        assert step._hidden is not None
        assert step._hidden.shape[0] == ROWS and (step._hidden.dtype, step._hidden.device) == (torch.bfloat16, CUDA)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.1, "min_new_tokens": 4},
    ],
    ids=["greedy", "filters", "penalties"],
)
@torch.no_grad()
def test_sampling(settings: dict[str, Any]) -> None:
    vocabulary = 151_936
    with faked() as strict:
        with strict.looking_away():
            sampler = TokenSampler(RolloutSettings(**settings), vocabulary, (5, 6), (7,), CUDA)
        chosen = sampler.choose(
            torch.empty(ROWS, vocabulary, device=CUDA),
            torch.empty(ROWS, dtype=torch.float64, device=CUDA),
            [3] * ROWS,
            torch.empty(ROWS, vocabulary, dtype=torch.bool, device=CUDA) if sampler.needs_seen else None,
        )
    for part in (chosen.tokens, chosen.logprobs, chosen.sampling_logprobs, chosen.entropies):
        assert (part.shape, part.device) == ((ROWS,), CUDA)
    assert chosen.tokens.dtype == torch.int64 and chosen.logprobs.dtype == torch.float32
