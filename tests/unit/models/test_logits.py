"""Log-probabilities in chunks: values, gradients and entropies are those of plain log-softmax over all logits."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2_5_VLForConditionalGeneration

from scripts.bench.counting import count, fake_mode, fake_policy
from tests.support.groups import tiny_policy
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.case import random_config
from vlm_pg.models.logits import chunk_bytes, judged, logits_fault, plain_weight, rows_of_chunks, token_logprobs
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.training.setup import _logits_line

ROWS, DIM, VOCAB = 7, 5, 11


class Operations(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = (2 * torch.randn(VOCAB, DIM, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, weight, targets, torch.randn(ROWS, generator=generator)


def expected(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> Any:
    logprobs = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_rows", [3, 100], ids=["chunks", "one piece"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_graph", [False, True])
@pytest.mark.parametrize("plain", [False, True], ids=["a head", "a weight"])
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_values_and_gradients(
    chunk_rows: int, temperature: float, entropy_graph: bool, plain: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = pretend_kernels(monkeypatch) if fused else []
    hidden, weight, targets, upstream = inputs()
    found = token_logprobs(
        lambda h: h @ weight.T,
        hidden,
        targets,
        temperature,
        chunk_rows,
        least_chunks=4,
        entropy_graph=entropy_graph,
        weight=weight if plain else None,
        fused=fused,
    )
    wanted = expected(hidden, weight, targets, temperature)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert found[1].requires_grad == entropy_graph
    losses = [
        values[0] @ upstream.to(values[0].dtype) + (values[1].sum() if entropy_graph else 0)
        for values in (found, wanted)
    ]
    got, want = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for loss in losses)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # Entropies of a head that is called go back by autograd.
    by_kernels = fused and (not entropy_graph or (plain and chunk_rows < ROWS))
    assert set(called) == ({"token_statistics", "logits_gradient"} if by_kernels else set())
    # Whoever goes back twice finds the same.
    torch.testing.assert_close(torch.autograd.grad(losses[0], (hidden, weight)), got, rtol=0, atol=0)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, spoilt: str = "") -> list[str]:
    """The kernels' results, by torch; ``spoilt``: one of them a hundredth off. Returns names of calls."""
    pytest.importorskip("triton")
    called: list[str] = []

    def token_statistics(logits: torch.Tensor, temperature: float, tokens: torch.Tensor) -> Any:
        called.append("token_statistics")
        logprobs = (logits.float() / temperature).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropies * (1.01 if spoilt == "token_statistics" else 1)

    def logits_gradient(
        logits: torch.Tensor, temperature: float, tokens: torch.Tensor, logprobs: torch.Tensor, negated: torch.Tensor,
        of_tokens: torch.Tensor, negated_entropies: Any = None, of_entropies: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        called.append("logits_gradient")
        found = (logits.float() / temperature).log_softmax(-1)
        torch.testing.assert_close(found.gather(1, tokens[:, None])[:, 0], logprobs)
        factor = negated[:, None]
        if negated_entropies is not None:
            factor = factor + (found - negated_entropies[:, None]) * of_entropies[:, None]
        gradient = (found.exp() * factor).scatter(1, tokens[:, None], of_tokens[:, None].float())
        return (gradient * (1.01 if spoilt == "logits_gradient" else 1)).to(logits.dtype)

    for function in (token_statistics, logits_gradient):
        monkeypatch.setattr(f"vlm_pg.models.fused_logits.{function.__name__}", function)
    return called


@pytest.mark.parametrize("spoilt", ["", "token_statistics", "logits_gradient"])
def test_kernels_are_judged(spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch, spoilt)
    fault = judged(torch.device("cpu"), torch.bfloat16)
    expected = {"": "", "token_statistics": "entropies's output", "logits_gradient": "log-probabilities's gradient"}
    assert str(fault or "").startswith(expected[spoilt]) and bool(fault) == bool(spoilt)


def test_where_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda", 0), torch.bfloat16
    found = iter([None, "1 off"])
    monkeypatch.setattr("vlm_pg.models.logits.judged", lambda *_: next(found))
    logits_fault.cache_clear()
    assert logits_fault(torch.device("cpu"), half) == "they are on cpu"
    assert logits_fault(cuda, half) is logits_fault(cuda, half) is None  # judged once
    assert logits_fault(cuda, torch.float16) == "1 off"
    assert str(logits_fault(cuda, torch.float32)).startswith("they are float32")
    policy = tiny_policy()
    assert not policy.fuses_logits(half)
    monkeypatch.setattr(type(policy), "device", cuda)
    monkeypatch.setattr(type(policy), "dtype", torch.float16)
    assert _logits_line(policy) == "logits: read by torch (1 off)"
    assert policy.fuses_logits(half) and not policy.fuses_logits(torch.float32)
    logits_fault.cache_clear()


def test_the_gradient_of_a_nearly_certain_target_survives_bf16() -> None:
    """p = 1 - 2e-4: a difference of two bf16 numbers would be 0, where 2e-4 can be told to three digits."""
    logits = torch.tensor([[8.5, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(lambda x: x, logits, torch.tensor([0]), 1.0, 8)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    # 1 / (1 + e^8.5) = 2.0343e-4
    torch.testing.assert_close(grad.float(), torch.tensor([[2.0343e-4, -2.0343e-4]]), rtol=4e-3, atol=0)


def test_bf16_logits_are_rounded_once() -> None:
    hidden, weight, targets, upstream = inputs(torch.bfloat16)
    logits = (hidden @ weight.T).detach().requires_grad_()
    logprobs, _ = token_logprobs(lambda x: x, logits, targets, 1.0, 3)
    (grad,) = torch.autograd.grad(logprobs @ upstream, logits)
    exact = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact.log_softmax(-1).gather(1, targets[:, None])[:, 0] @ upstream.double(), exact)
    # Half a unit in the last of bf16's 8 bits.
    torch.testing.assert_close(grad.double(), want, rtol=2**-8, atol=1e-9)


def test_chunks_of_a_plain_weight_are_those_of_a_head() -> None:
    """Values to the bit, and as many products: recomputation runs the head and nothing else over the vocabulary."""
    found = []
    for plain in (False, True):
        hidden, weight, targets, upstream = inputs(torch.bfloat16)
        with Operations() as operations:
            logprobs, entropies = token_logprobs(
                lambda h, w=weight: h @ w.T, hidden, targets, 0.7, 3, weight=weight if plain else None
            )
            (logprobs @ upstream).backward()
        counts = operations.counts
        assert (counts["_log_softmax"], counts["_softmax"], counts["exp"]) == (3, 3, 3)
        assert counts["mm"] + counts["addmm"] == 3 * 2 + 3 * 2
        found.append((logprobs.detach(), entropies, hidden.grad))
    for values, wanted in zip(found[1], found[0], strict=True):
        assert torch.equal(values, wanted)


def test_a_weights_gradient_is_rounded_once_a_chunk() -> None:
    """Of 32 chunks in bf16: nearer to the exact sum than products that are rounded before they are added."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(64, 32, generator=generator).bfloat16()
    weight = torch.randn(48, 32, generator=generator).bfloat16()
    targets = torch.randint(0, 48, (64,), generator=generator)
    wide = weight.double().requires_grad_()
    exact = (hidden.double() @ wide.T).log_softmax(-1).gather(1, targets[:, None]).sum()
    (want,) = torch.autograd.grad(exact, wide)
    errors = []
    for plain in (False, True):
        w = weight.clone().requires_grad_()
        logprobs, _ = token_logprobs(lambda h, w=w: h @ w.T, hidden, targets, 1.0, 2, weight=w if plain else None)
        (grad,) = torch.autograd.grad(logprobs.sum(), w)
        assert grad.dtype == torch.bfloat16
        errors.append(((grad.double() - want).norm() / want.norm()).item())
    assert errors[1] < errors[0] < 0.01


@pytest.mark.parametrize("trains", ["hidden", "weight"])
def test_where_one_of_both_trains(trains: str) -> None:
    hidden, weight, targets, upstream = inputs()
    frozen, trained = (weight, hidden) if trains == "hidden" else (hidden, weight)
    logprobs, _ = expected(hidden, weight, targets, 1.0)
    (want,) = torch.autograd.grad(logprobs @ upstream.double(), trained)
    frozen.requires_grad_(False)
    logprobs, _ = token_logprobs(lambda h: h @ weight.T, hidden, targets, 1.0, 3, weight=weight)
    (logprobs @ upstream).backward()
    torch.testing.assert_close(trained.grad, want, rtol=1e-4, atol=1e-5)
    assert frozen.grad is None


def test_its_gradient_exists_once() -> None:
    """At 7B's vocabulary and width, counted: one gradient of the weight beside a chunk's logits, where it was three."""
    vocab, width, rows = 152_064, 3_584, 256
    fakes = fake_mode()
    with fakes:
        hidden = torch.empty(4 * rows, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4 * rows, dtype=torch.int64)
    peaks = []
    for given in (None, weight):

        def run(given: torch.Tensor | None = given) -> None:
            head = partial(F.linear, weight=weight)
            token_logprobs(head, hidden, targets, 1.0, rows, weight=given)[0].sum().backward()

        peaks.append(count(run, fakes).peak_bytes)
        hidden.grad = weight.grad = None
    one, chunk = vocab * width * 2, vocab * rows
    assert peaks[0] > 3 * one
    # Logits and their gradient in bf16; scaled ones and their softmax in fp32.
    assert one + 2 * 2 * chunk < peaks[1] < one + (2 * 2 + 2 * 4) * chunk + 2**26


def test_how_large_chunks_are() -> None:
    assert chunk_bytes(100, 350) == 350
    assert chunk_bytes(100, 350, entropy_graph=True) == 175
    assert chunk_bytes(100, 50) == 100
    # One piece of what is small anyway; else two at the least, even ones.
    assert rows_of_chunks(5, 5, 40) == 5
    assert [rows_of_chunks(rows, 5, 40) for rows in (6, 39, 80, 81)] == [5, 20, 40, 27]
    assert [rows_of_chunks(rows, 5, 5) for rows in (0, 5, 6, 12)] == [5, 5, 5, 5]


def one_layer_of_7b() -> Any:
    config = random_config("7b", False)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(usual)


def test_chunks_follow_a_stream_that_is_computed_again() -> None:
    """Of 7B in bf16, 24,576 rows: an MLP's tensor of 18,944 is 888 MiB, 1,530 rows of 152,064 in fp32; of 8,192 rows
    six chunks. Of 256 MiB it would be 441."""

    def rows_with(stream: int = 24_576, entropies: bool = False, tiles: int = 0, **settings: Any) -> int:
        chosen = ModelSettings(path="7b", dtype="bf16", **({"gradient_checkpointing": True} | settings))
        policy = fake_policy(one_layer_of_7b, chosen, fake_mode(), CudaFlashKernel())
        policy.use_memory(MemoryChoice(mlp_tile_rows=tiles))
        return policy.chunk_rows(8192, stream, entropies)

    assert rows_with() == 1366
    assert rows_with(entropies=True) == 745  # 765 in 11
    assert rows_with(tiles=4096) == rows_with(stream=0) == 441
    assert rows_with(gradient_checkpointing=False) == 441
    assert rows_with(logits_chunk_mb=512) == 882
    with torch.no_grad():
        assert rows_with() == 441


class Doubled(torch.nn.Linear):
    pass


def test_which_heads_are_a_product_and_no_more() -> None:
    head = torch.nn.Linear(4, 9, bias=False)
    assert plain_weight(head) is head.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_weight(head) is None
    assert plain_weight(torch.nn.Linear(4, 9)) is plain_weight(Doubled(4, 9, bias=False)) is None
    replaced, scattered = (torch.nn.Linear(4, 9, bias=False) for _ in range(2))
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    scattered.weight.ds_id = 1
    assert plain_weight(replaced) is plain_weight(scattered) is None
    hooks = ("forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook")
    for name in hooks:
        handle = getattr(head, f"register_{name}")(lambda *_: None)
        assert plain_weight(head) is None, name
        handle.remove()
    assert plain_weight(head) is head.weight


def test_a_temperature_of_zero() -> None:
    hidden, weight, targets, _ = inputs()
    with pytest.raises(ValueError, match="temperature is 0; it must be above 0"):
        token_logprobs(lambda h: h @ weight.T, hidden, targets, 0, 3)
