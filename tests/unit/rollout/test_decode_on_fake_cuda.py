"""Generation in bf16, with published heads and widths, on a GPU that is not there: prefill, a step as it is captured.

A CUDA graph holds kernels only. Whatever asks the device for a value, or copies between host and device, raises here as
it would while the step is recorded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.fakes import CPU, CUDA, Strict, as_fake, fake_policy, faked, features_of, groups_of
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.models.policy import Policy, Rows
from vlm_pg.models.registry import FAMILIES
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.fused.choice import FusedStep, fused_unchecked
from vlm_pg.rollout.graphs import DecodeGraph, GraphUse
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.prefix_attention import SplitPrefixAttention
from vlm_pg.rollout.ragged import OwnRows, OwnStates, RaggedContext
from vlm_pg.rollout.sampling import TokenSampler
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import VisualFeatures

RAGGED = [name for name in FAMILY_NAMES if not FAMILIES[name].linear_attention]
ROWS = 8
TORCH = FusedStep("torch")


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
        monkeypatch.setattr(policy.vision, "encode", lambda asked, **_: [of_prompt[p.sample_id] for p in asked])
    nodes = range(len(waiting.nodes))
    store.rearrange((), {node: waiting.nodes[node].num_tokens for node in nodes})
    ends = {path[-1] for path in waiting.paths}
    prefill = FakePrefill(policy, store, waiting.nodes, prompts, budget, lambda: None, layers=layers)
    hidden = prefill.run(nodes, ends)
    assert hidden.keys() == ends
    for state in hidden.values():
        assert (state.shape[0], state.dtype, state.device) == (
            policy.model.config.get_text_config().hidden_size,
            torch.bfloat16,
            CUDA,
        )
    return store, waiting


def step_of(policy: Policy, strict: Strict, monkeypatch: pytest.MonkeyPatch, fused: FusedStep = TORCH) -> DecodeGraph:
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
PREFILLED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3")


@pytest.mark.parametrize(
    "family, budget",
    [
        # Pieces do all that a whole does, and read what is stored.
        *(pytest.param(family, PIECES, id=f"{family}-in pieces behind what is stored") for family in PREFILLED),
        *(
            pytest.param(
                *(family, WHOLE),
                marks=() if family in ("qwen2_5_vl", "qwen3_5") else pytest.mark.matrix,
                id=f"{family}-whole",
            )
            for family in PREFILLED
        ),
    ],
)
@torch.no_grad()
def test_prefill(family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with faked():
        policy = fake_policy(family, CUDA)
        store, _ = prefilled(policy, monkeypatch, budget)
        _, kv_heads, dim = policy.family.head_shape(policy.model.config)
        for kept in (*store.keys.values(), *store.values.values()):
            assert (kept.shape, kept.dtype) == ((store.num_tokens, kv_heads, dim), torch.bfloat16)
            assert kept.device == CUDA


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
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
            prefilled(policy, monkeypatch, PIECES, layers)
            assert strict.seen & {"silu_mul", "rms_norm", "rotate"} == fused


@torch.no_grad()
def test_rows_of_linear_layers_start_and_move_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is admitted, and rows that close up: what the host says goes to the device without holding it up."""
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
@pytest.mark.parametrize("family", RAGGED)
@torch.no_grad()
def test_a_step_can_be_captured(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        pytest.importorskip("triton")
    with faked() as strict:
        policy = fake_policy(family, CUDA)
        step = step_of(policy, strict, monkeypatch, fused_unchecked(policy) if fused else TORCH)
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
