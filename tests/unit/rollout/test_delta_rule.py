"""One token of the gated delta rule: by hand, against transformers', and how often the state passes through memory."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.support.traffic import TrafficBytes
from vlm_pg.rollout import linear_step
from vlm_pg.rollout.linear_step import DeltaRule, delta_rule_for, gated_delta_step_

ROWS, HEADS, KEY, VALUE = 3, 4, 16, 24


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query, key, value, logarithm of the decay, beta."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(ROWS, HEADS, size, generator=generator).to(dtype) for size in (KEY, KEY, VALUE))
    log_decay, beta = (torch.rand(ROWS, HEADS, generator=generator) for _ in range(2))
    return query, key, value, -4 * log_decay, beta.to(dtype)


def random_state() -> torch.Tensor:
    return torch.randn(ROWS, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(2))


def transformers_rule(state: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, log_decay, beta = (part[:, None] for part in parts)
    out, after = torch_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[:, 0], after


def test_a_token_by_hand() -> None:
    """Key (3, 4) has length 5 and query (0, 2) length 2; half of the state is forgotten, half of the error learned."""
    state = torch.tensor([[10.0, 0.0], [0.0, 20.0]])[None, None]
    query, key, value = (torch.tensor([[numbers]]) for numbers in ([0.0, 2.0], [3.0, 4.0], [13.0, 18.0]))
    log_decay, beta = torch.tensor([[math.log(0.5)]]), torch.tensor([[0.5]])
    out = gated_delta_step_(state, query, key, value, log_decay, beta)
    # k = (0.6, 0.8). Decayed: [[5, 0], [0, 10]]; read: (3, 8); delta: ((13 - 3) / 2, (18 - 8) / 2) = (5, 5).
    expected = torch.tensor([[5.0 + 3.0, 3.0], [4.0, 10.0 + 4.0]])
    assert torch.allclose(state[0, 0], expected, rtol=1e-6)
    # q = (0, 1) / sqrt(2): the second row.
    assert torch.allclose(out[0, 0], torch.tensor([4.0, 14.0]) / math.sqrt(2.0), rtol=1e-6)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_many_tokens_are_transformers(dtype: torch.dtype, bound: float) -> None:
    """In bf16 transformers rounds the output, and nothing else."""
    state, expected_state = random_state(), random_state()
    parts = operands(dtype)
    for token in range(50):
        rolled = tuple(part.roll(token, dims=1) for part in parts)
        out = gated_delta_step_(state, *rolled)
        expected, expected_state = transformers_rule(expected_state, *rolled)
        assert (out - expected.float()).abs().max() < bound * expected.abs().max()
        assert (state - expected_state).abs().max() < 2e-6 * expected_state.abs().max()


def test_autocast_does_not_round_the_state() -> None:
    state, expected = random_state(), random_state()
    gated_delta_step_(expected, *operands())
    with torch.autocast("cpu", torch.bfloat16):
        gated_delta_step_(state, *operands())
    assert torch.equal(state, expected)


def traffic(rule: Any) -> tuple[int, int]:
    state, parts = random_state(), operands()
    with TrafficBytes(least=4 * state.numel()) as counted:
        rule(state, *parts)
    size = 4 * state.numel()
    return counted.read // size, counted.written // size


def test_a_state_is_read_three_times_and_written_twice() -> None:
    """transformers' torch code reads tensors of its size seven times and writes five (5.23)."""
    assert traffic(gated_delta_step_) == (3, 2)
    assert traffic(transformers_rule) > (5, 3)


def test_the_triton_kernel_gives_what_torch_gives() -> None:
    """In Triton's interpreter; torch's operators give what transformers gives, see above."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.support.interpreted_delta"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 4 and max(errors) < 2e-6


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.matrix) for c in (80, 89, 100, 120))])
def test_the_triton_kernel_compiles_for_gpus_that_are_not_here(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each state loaded and stored once, none of it spilled to memory."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vlm_pg.rollout.fused.delta_rule import COLUMNS, one_token

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = dict.fromkeys(("query", "key", "value", "beta"), "*bf16")
    pointers |= dict.fromkeys(("state", "log_decay", "out"), "*fp32")
    types = pointers | {"scale": "fp32", "epsilon": "fp32"}
    constants = {"KEY": 128, "VALUE": 128, "KEY_ROOM": 128, "COLUMNS": COLUMNS}
    signature = {name: types.get(name, "constexpr") for name in one_token.arg_names}
    aligned = {(one_token.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=one_token, signature=signature, constexprs=constants, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    floats_of_a_thread = 128 * COLUMNS // (4 * 32)
    for way in ("ld", "st"):
        assert len(re.findall(rf"{way}\.global[\w.]*\.v4\.[bf]32", code)) == floats_of_a_thread // 4
    assert ".local" not in code


def without_decay(state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    value, log_decay, beta = rest
    return gated_delta_step_(state, query, key, value, 0.0 * log_decay, beta)


def test_a_rule_is_compared_before_it_is_used() -> None:
    cpu = torch.device("cpu")
    assert linear_step._difference(gated_delta_step_, cpu, KEY, VALUE) is None
    assert "differs from torch's operators by" in str(linear_step._difference(without_decay, cpu, KEY, VALUE))
    unknown = linear_step._difference(lambda *parts: gated_delta_step_(*parts) * torch.nan, cpu, KEY, VALUE)
    assert "by nan" in str(unknown)


def test_the_triton_kernel_is_taken_where_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    choose = delta_rule_for.__wrapped__
    assert choose(torch.device("cpu"), KEY, VALUE) == DeltaRule("torch", gated_delta_step_)

    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    cuda, found = torch.device("cuda", 0), {}
    for case, compared in {"same": lambda *_: None, "other": lambda *_: "differs", "broken": no_compiler}.items():
        monkeypatch.setattr(linear_step, "_difference", compared)
        found[case] = choose(cuda, KEY, VALUE)
    assert found["same"].name == "triton" and found["same"].step_ is not gated_delta_step_
    assert found["other"] == DeltaRule("torch (Triton kernel: differs)", gated_delta_step_)
    assert found["broken"].name == "torch (Triton kernel: RuntimeError: Failed to find C compiler.)"
