"""Fused kernels of a decode step give what transformers' modules give, bit for bit where sums have one order.

Run in Triton's interpreter, which rounds to float16 as a GPU does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.fake_cuda import Elsewhere
from tests.support.groups import make_case, random_group, tiny_policy
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.models.layer_globals import layer_global
from vlm_pg.models.liger import apply_liger
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.fused.choice import KERNELS, fused_step, fused_unchecked, judged
from vlm_pg.rollout.settings import RolloutSettings

pytest.importorskip("triton")


def printed_by(module: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout.splitlines()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.matrix)])
def test_kernels_give_what_torch_gives(dtype: str) -> None:
    lines = printed_by("tests.support.interpreted_fused", dtype)
    cases = [line.rsplit(" ", 2) for line in lines if not line.startswith("comparison")]
    assert len(cases) == 8 + 4 + 2 + 12 + 9 + 6 + 4 + 4 + 15
    for name, unequal, error in cases:
        if name.startswith(("product", "chunks")):
            # Of a chunk of logits a rounding here or there.
            assert float(error) < 2e-6 and ("float32" in name or "gradient" not in name or float(unequal) < 1e-3), name
            continue
        if "float16" in name and not name.startswith(("parts ", "parts-lse", "own", "drawing", "statistics")):
            assert float(unequal) == 0, name
        # Probabilities are rounded before they are multiplied by the values.
        assert float(error) < (1e-3 if name.startswith("own torch.float16") else 2e-6), name
    logits, *agreeing, norm, gate = (
        line.removeprefix("comparison ") for line in lines if line.startswith("comparison")
    )
    assert logits == "logits: None" and len(agreeing) == 2 and all(line.endswith(": {}") for line in agreeing), agreeing
    assert "{'norms': 'Qwen3VLTextRMSNorm is " in norm and "{'gates': 'OneMore is " in gate


def steps_agree(line: str, steps: int) -> None:
    family, worst, *calls = line.split()
    assert float(worst) < 1e-5
    called = {name.removeprefix("vlm_pg::"): int(count) for name, count in (call.split("=") for call in calls)}
    policy = tiny_policy(family=family)
    kinds = policy.family.layer_kinds(policy.model.config)
    full, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    assert called.pop("own_attention") == full * steps
    assert called.pop("merge_parts") == 2 * full * steps, "one call a level, in however many pieces"
    expected = {"rms_norm": 1, "add_norm": 2 * len(kinds), "rotate_append": full, "silu_mul": len(kinds)}
    expected["gated_delta_step_"] = linear
    assert called == {name: steps * count for name, count in expected.items() if count}


def test_steps_on_them_are_those_of_cohorts() -> None:
    (line,) = printed_by("tests.support.interpreted_step", "2", "qwen3_vl")
    steps_agree(line, 2)


def test_a_prefill_on_them_is_one_on_modules() -> None:
    for line in printed_by("tests.support.interpreted_step", "prefill", "qwen3_vl"):
        family, worst, *calls = line.split()
        assert float(worst) < 1e-5, line
        called = {name.removeprefix("vlm_pg::"): int(count) for name, count in (call.split("=") for call in calls)}
        assert called.keys() == {"rms_norm", "silu_mul"}, line
        # Each pass of each layer in several tiles.
        policy = tiny_policy(family=family)
        assert called["silu_mul"] > 2 * 2 * len(policy.language_model.layers), line


@pytest.mark.matrix
def test_more_steps_of_more_families_too() -> None:
    lines = printed_by("tests.support.interpreted_step", "6", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
    assert len(lines) == 3
    for line in lines:
        steps_agree(line, 6)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, around_one: bool) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (normed * (weight.float() + around_one)).to(x.dtype)


def add_norm(x: torch.Tensor, residual: torch.Tensor, *weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert (x.shape, x.dtype) == (residual.shape, residual.dtype)
    total = x.float() + residual.float()
    return total.to(x.dtype), rms_norm(total, *weight).to(x.dtype)


def rotate_append(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, weights: Any, epsilon: float, around_one: bool, *written: Any
) -> torch.Tensor:
    def rotated(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        wide = rms_norm(x.float(), *weight, epsilon, around_one) if weight else x.float()
        first, second, rest = wide.split([size // 2, size // 2, x.shape[-1] - size], -1)
        along = torch.cat([first, second], -1) * cos.float()[:, None]
        across = torch.cat([-second, first], -1) * sin.float()[:, None]
        return torch.cat([along + across, rest], -1).to(x.dtype)

    size = cos.shape[-1]
    keys, values, newest, queries, starts = written
    q, keys[newest], values[newest] = rotated(q, *weights[:1]), rotated(k, *weights[1:]), v
    repeats = q.shape[1] // k.shape[1]
    for of_rows in starts.long():
        for repeat in range(repeats):
            reads = of_rows >= 0
            queries[of_rows[reads] + repeat] = q[reads, repeat::repeats]
    return q


def merge_parts(own: Any, own_lse: Any, parts: Any, parts_lse: Any, starts: Any, dtype: torch.dtype) -> Any:
    rows, heads = own.shape[1:3]
    values = torch.cat([own, parts.view(-1, *own.shape[1:])]).float()
    lse = torch.cat([own_lse.mT, parts_lse.view(-1, rows, heads)])
    return torch.einsum("prn,prnh->rnh", lse.softmax(0), values).to(dtype), lse.logsumexp(0).t()


def own_attention(q: Any, keys: Any, values: Any, lengths: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = OracleKernel().ragged_forward(q.float(), keys.float(), values.float(), lengths, scale)
    return out[None], lse[None]


def token_statistics(logits: torch.Tensor, temperature: float, tokens: torch.Tensor) -> Any:
    shares = (logits.float() / temperature).softmax(-1)
    return shares.gather(1, tokens[:, None])[:, 0].log(), torch.special.entr(shares).sum(-1)


def draw_tokens(scores: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_shares = scores.double().log_softmax(-1)
    tokens = torch.searchsorted(log_shares.exp().cumsum(-1), uniform[:, None], right=True)
    return tokens[:, 0], log_shares.gather(-1, tokens)[:, 0].float()


# What compilers may make of the kernels: nothing is rounded on the way.
ROUNDED_ONCE: dict[str, tuple[str, Callable[..., Any]]] = {
    "norms": ("rollout.fused.layers", rms_norm),
    "residual sums": ("rollout.fused.layers", add_norm),
    "gates": ("rollout.fused.norms", silu_mul),
    "rotary positions": ("rollout.fused.rotation", rotate_append),
    "merging": ("rollout.fused.attention", merge_parts),
    "own tokens": ("rollout.fused.attention", own_attention),
    "drawing": ("rollout.fused.drawing", draw_tokens),
    "log-probabilities": ("models.fused_logits", token_statistics),
}


def use(monkeypatch: pytest.MonkeyPatch, kernel: str, change: Callable[[Any], Any] = lambda x: x) -> None:
    file, function = ROUNDED_ONCE[kernel]

    def changed(*arguments: Any) -> Any:
        found = function(*arguments)
        return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

    monkeypatch.setattr(f"vlm_pg.{file}.{function.__name__}", changed)


def use_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        use(monkeypatch, kernel)
    monkeypatch.setattr("vlm_pg.rollout.fused.layers.silu_mul", silu_mul)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_kernels_that_round_less_than_modules_are_taken(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    for kernel in KERNELS:
        use(monkeypatch, kernel)
    policy = tiny_policy(family=family, dtype=dtype)
    assert judged(policy.language_model, policy.device, dtype) == {}


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """The last two bits that bfloat16 has are zeros."""
    return (x.float().view(torch.int32) & ~0x3FFFF).view(torch.float32).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("wrong", KERNELS)
def test_each_is_judged_alone(monkeypatch: pytest.MonkeyPatch, wrong: str, dtype: torch.dtype) -> None:
    for kernel in KERNELS:
        use(monkeypatch, kernel, cut_off if kernel == wrong else lambda x: x)
    policy = tiny_policy(family="qwen3_vl", dtype=dtype)
    refused = judged(policy.language_model, policy.device, dtype)
    with_it = {"norms": ["residual sums"], "merging": ["own tokens"]}.get(wrong, [])
    assert list(refused) == [wrong, *with_it] and re.search(r" is \d\.\de-0[1-3] off, by modules \d", refused[wrong])
    there: Any = Elsewhere(policy, "cuda")
    monkeypatch.setattr(choice, "judged", lambda *_: refused)
    step = fused_step(there, RolloutSettings())
    words = "; ".join(f"{name} by torch: {why}" for name, why in refused.items())
    assert step.name == f"triton ({words})"
    assert (step.deferred is None) == (wrong == "rotary positions")
    assert (step.merges, step.attends) == (wrong != "merging", wrong not in ("merging", "own tokens"))
    assert (step.draws, step.statistics) == (wrong != "drawing", wrong != "log-probabilities")
    before = forwards(policy)
    with step.layers:
        changed = sum(one is not other for one, other in zip(forwards(policy), before, strict=True))
    layers = len(policy.language_model.layers)
    without = {"norms": 5 * layers + 1} | dict.fromkeys(("gates", "residual sums", "rotary positions"), layers)
    assert changed == 12 * layers + 1 - without.get(wrong, 0)


def test_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{}, dict.fromkeys(KERNELS, "1 off")])  # each model is judged once
    monkeypatch.setattr(choice, "judged", lambda *_: next(found))

    def name(policy: Any, **settings: Any) -> str:
        step = fused_step(policy, RolloutSettings(**settings))
        assert step.merges == step.statistics == step.name.startswith("triton")
        return step.name

    here = tiny_policy()
    there: Any = Elsewhere(here, "cuda")
    assert name(here) == "torch (the model is on cpu)"
    assert name(there, fused_kernels=False) == "torch (rollout.fused_kernels is false)"
    assert name(there) == name(there) == "triton"
    assert name(Elsewhere(tiny_policy(), "cuda")).startswith(
        "torch (norms by torch: 1 off; residual sums by torch: 1 off;"
    )
    there.lockstep = object()
    assert name(there) == "torch (weights are scattered over ranks)"
    there.lockstep = None
    weight: Any = next(here.language_model.parameters())
    weight.ds_id = 0
    assert name(there) == "torch (weights are scattered over ranks)"


def test_what_does_not_compile_is_not_used() -> None:
    there: Any = Elsewhere(tiny_policy(), "cuda")
    step = fused_step(there, RolloutSettings())
    assert not step.merges and not step.statistics and step.name.count("Error: ") == len(KERNELS)


def test_rows_whose_numbers_lie_apart_are_refused() -> None:
    from vlm_pg.rollout.fused.norms import rms_norm

    with pytest.raises(AssertionError):
        rms_norm(torch.randn(8, 4).t(), torch.ones(8), 1e-6, False)


def test_a_norm_with_more_than_a_weight_stays() -> None:
    """With a bias that is still zero it would pass the comparison."""
    policy = tiny_policy(family="qwen3_vl")
    norm: Any = policy.language_model.norm
    norm.bias = torch.nn.Parameter(torch.zeros_like(norm.weight))
    before = forwards(policy)
    with fused_unchecked(policy).layers:
        assert "forward" not in vars(norm) and forwards(policy) != before


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_layers_on_liger_are_those_of_any_other_during_a_step(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Judged by transformers' code, put in for a step, and liger's (which run on no CPU) are back behind it.

    A scoring pass rotates as ever, for which liger's rotation is transformers' here.
    """
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr("vlm_pg.models.liger._on_gpu", lambda model: True)
    for kernel in KERNELS:
        use(monkeypatch, kernel)
    policy, plain = tiny_policy(family=family), tiny_policy(family=family)
    rotation = layer_global(plain.language_model.layers[-1].self_attn, "apply_rotary_pos_emb")
    monkeypatch.setattr("vlm_pg.models.liger_layers.LigerRopeFunction", SimpleNamespace(apply=rotation))
    apply_liger(policy.model, True)
    assert judged(policy.language_model, policy.device, policy.dtype) == {}
    group = random_group(plain, make_case(plain, "text", seed=0), [5, 3], seed=0)
    monkeypatch.setattr("vlm_pg.rollout.fused.layers.silu_mul", silu_mul)
    before, found = forwards(policy), []
    for one in (plain, policy):
        with torch.no_grad(), fused_unchecked(one).layers:
            found.append(torch.cat(list(one.logprobs([group])[0])))
    assert torch.equal(*found) and forwards(policy) == before
    assert fused_unchecked(policy).name == "triton"
    words = "norms by liger-kernel: 1; merging by torch: 2"
    assert fused_unchecked(policy, {"norms": "1", "merging": "2"}).name == f"triton ({words})"


def forwards(policy: Any) -> list[Any]:
    return [vars(module).get("forward") for module in policy.model.modules()]


def test_layers_are_as_they_were_behind_an_error() -> None:
    policy = tiny_policy(family="qwen3_vl")
    layer: Any = policy.language_model.layers[0]
    layer.mlp.forward = usual = layer.mlp.forward  # as tiles of rows leave it
    before = forwards(policy)
    changed: list[Any] = []

    def fails() -> None:
        with fused_unchecked(policy).layers:
            changed.extend(one for one, other in zip(forwards(policy), before, strict=True) if one is not other)
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fails()
    # Of each layer its own, four norms, a gate, a rotation, five packed products; the last norm. Nothing of the tower.
    assert len(changed) == 12 * len(policy.language_model.layers) + 1
    assert forwards(policy) == before and vars(layer.mlp)["forward"] is usual


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"])
def test_log_probabilities_on_them_are_those_on_modules(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """In fp32; in bf16 rounding sends some 5 of 1,000 tokens of a mixture to another expert."""
    use_all(monkeypatch)
    policy = tiny_policy(family=family)
    group = random_group(policy, make_case(policy, "text", seed=1), [30, 30, 12], seed=1)
    found = []
    for layers in (nullcontext(), fused_unchecked(policy).layers):
        with torch.no_grad(), layers:
            found.append(torch.cat(list(policy.logprobs([group])[0])))
    assert (found[0] - found[1]).abs().max() < 1e-4


class Plain:
    """A context that knows nothing of kernels: what it is given it gives back."""

    recorder = recorded = None

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.given = q, k, v
        return q


class Deferring(Plain):
    """Takes what was deferred, and attends without it; ``taken``: of each layer."""

    def __init__(self, deferred: Any):
        self.deferred = deferred
        self.taken: list[Any] = []

    def attend(self, layer_index: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.taken.append(self.deferred.take())
        return super().attend(layer_index, q, *rest)


def one_token(policy: Any, context: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.hidden_states(torch.tensor([3]), torch.tensor([5]).expand(3, -1), context)


def test_a_context_that_does_not_rotate_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than attend with queries and keys that were never rotated; in the next layer, or at the end."""
    use_all(monkeypatch)
    policy = tiny_policy(family="qwen3_vl")
    fused = fused_unchecked(policy)
    assert fused.deferred is not None
    expected = one_token(policy, Plain())
    for layers in (len(policy.language_model.layers), 1):
        policy.language_model.layers = policy.language_model.layers[:layers]
        with pytest.raises(AssertionError, match="queries that were not rotated"), fused_unchecked(policy).deferred:  # type: ignore[union-attr]
            one_token(policy, Plain())
    # Elsewhere they are rotated before.
    policy = tiny_policy(family="qwen3_vl")
    with fused_unchecked(policy).layers:
        assert (one_token(policy, Plain()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_what_is_narrower_than_positions_is_rotated_as_ever(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast; deferred norms of heads are applied."""
    use_all(monkeypatch)
    policy = tiny_policy(family=family)
    usual, context = Plain(), Deferring(fused_unchecked(policy).deferred)
    with torch.autocast("cpu", torch.bfloat16):
        one_token(policy, usual)
        with context.deferred:
            one_token(policy, context)
    assert set(context.taken) == {None}
    for one, other in zip(usual.given, context.given, strict=True):
        assert one.dtype == other.dtype and (one - other).abs().max() < 0.05


def test_norms_of_heads_with_hooks_run_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    use_all(monkeypatch)
    policy = tiny_policy(family="qwen3_vl")
    seen: list[torch.Tensor] = []
    policy.language_model.layers[0].self_attn.q_norm.register_forward_hook(lambda *given: seen.append(given[2]))
    one_token(policy, Plain())
    context = Deferring(fused_unchecked(policy).deferred)
    with context.deferred:
        one_token(policy, context)
    assert [len(rotation.weights) for rotation in context.taken] == [0, *[2] * (len(context.taken) - 1)]
    assert (seen[0] - seen[1]).abs().max() < 1e-5


def test_a_sum_that_is_changed_is_normed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hook that steers a layer's output, in place or not; so is what another layer gives, or autocast widens."""
    use_all(monkeypatch)
    added = torch.linspace(-3, 3, 64)
    for steer in (lambda out: out.add_(added), lambda out: out + added, lambda out: None):
        policy = tiny_policy(family="qwen2_5_vl")
        policy.language_model.layers[0].register_forward_hook(lambda *given, steer=steer: steer(given[2]))
        expected = one_token(policy, Plain())
        with fused_unchecked(policy).layers:
            assert (one_token(policy, Plain()) - expected).abs().max() < 1e-5
    policy.language_model.layers[1].forward = lambda hidden, **_: hidden  # whose code is no method
    expected = one_token(policy, Plain())
    with fused_unchecked(policy).layers:
        assert (one_token(policy, Plain()) - expected).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        expected = one_token(policy, Plain())
        with fused_unchecked(policy).layers:
            assert (one_token(policy, Plain()) - expected).abs().max() < 0.05
