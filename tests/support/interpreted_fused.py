"""A process of its own, for Triton's interpreter: the kernels of ``rollout/fused`` against torch's operators.

Takes the dtypes as arguments. Prints a line for each case: its name, the share of numbers that are not equal, the
largest error of any. Then what the comparison before use says of two families, of a norm that multiplies before it
rounds, and of feed-forward layers that only look like those of the families.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tests.support.groups import tiny_policy
from vlm_pg.attention.grouped import merge_
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.models.fused_logits import token_statistics
from vlm_pg.models.logits import judged, token_logprobs
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.fused.attention import merge_parts, own_attention
from vlm_pg.rollout.fused.drawing import draw_tokens
from vlm_pg.rollout.fused.norms import add_norm, rms_norm, silu_mul
from vlm_pg.rollout.fused.rotation import rotate_append
from vlm_pg.rollout.sampling import draw, policy_statistics

# Not bfloat16, which the interpreter cuts off where a GPU rounds.
NUMBERS = tuple(getattr(torch, name) for name in sys.argv[1:])


def report(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (name, got.dtype, expected.dtype)
    error = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    print(f"{name} {float((got != expected).double().mean())} {error}")


def norms() -> None:
    for dtype in NUMBERS:
        for width in (24, 128, 2560):
            weight = (1 + torch.randn(width)).to(dtype)
            for kind, module in (("norm", Qwen3RMSNorm(width)), ("around-one", qwen3_5.Qwen3_5RMSNorm(width))):
                module.weight.data = weight
                x = torch.randn(1, 5, width).to(dtype)
                report(f"{kind} {dtype} {width}", rms_norm(x, weight, 1e-6, kind != "norm"), module(x))
        # Every second run of 32 numbers, as where queries and gates lie side by side.
        heads = torch.randn(1, 3, 4, 64).to(dtype)[..., :32]
        module = Qwen3RMSNorm(32).to(dtype)
        report(f"norm {dtype} strided", rms_norm(heads, module.weight, 1e-6, False), module(heads))
        # Two heads of each token of a product that has seven.
        heads = torch.randn(1, 3, 7 * 32).to(dtype)[..., 32:96].view(1, 3, 2, 32)
        report(f"norm {dtype} of a packed product", rms_norm(heads, module.weight, 1e-6, False), module(heads))


def gates() -> None:
    for dtype in NUMBERS:
        gate, up = (5 * torch.randn(1, 3, 700).to(dtype) for _ in range(2))
        report(f"gate {dtype}", silu_mul(gate, up), F.silu(gate) * up)
        # Both halves of one product.
        gate, up = (5 * torch.randn(1, 3, 700).to(dtype)).split(350, -1)
        report(f"gate {dtype} halves", silu_mul(gate, up), F.silu(gate) * up)


def sums() -> None:
    for dtype in NUMBERS:
        for kind, norm in (("sum", Qwen3RMSNorm(320)), ("sum-around-one", qwen3_5.Qwen3_5RMSNorm(320))):
            norm.weight.data = (1 + torch.randn(320)).to(dtype)
            x, residual = (torch.randn(1, 5, 320).to(dtype) for _ in range(2))
            total, normed = add_norm(x, residual, norm.weight, 1e-6, kind != "sum")
            report(f"{kind} {dtype}", total, residual + x)
            report(f"{kind}-norm {dtype}", normed, norm(residual + x))


def rotations() -> None:
    """Rows in a cache of five slots each; queries for four pieces, of which rows read none, one or all."""
    rows, repeats, kv_heads = 3, 2, 2
    starts = (torch.randperm(4 * rows) * repeats).view(4, rows).int()
    starts[:, 1], starts[1:, 2] = -1, -1
    newest = torch.tensor([4, 5, 12])
    for dtype in NUMBERS:
        for size, rotary, kind in ((16, 16, None), (24, 24, Qwen3RMSNorm), (40, 16, qwen3_5.Qwen3_5RMSNorm)):
            heads = 2 * kv_heads + repeats * kv_heads
            packed = torch.randn(rows, heads, 2 * size).to(dtype)[..., :size]
            q, k, v = packed.split([repeats * kv_heads, kv_heads, kv_heads], 1)
            angles = torch.randn(rows, rotary // 2).repeat(1, 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            norms = [kind(size).to(dtype) for _ in range(2)] if kind else []
            for norm in norms:
                norm.weight.data = (1 + torch.randn(size)).to(dtype)
            theirs = apply_rotary_pos_emb if rotary == size else qwen3_5.apply_rotary_pos_emb
            given = [norm(x) for norm, x in zip(norms, (q, k), strict=True)] if norms else [q, k]
            expected = [
                x[0].transpose(0, 1) for x in theirs(*(x.transpose(0, 1)[None] for x in given), cos[None], sin[None])
            ]
            keys, values = (torch.full((rows * 5, kv_heads, size), 7.0).to(dtype) for _ in range(2))
            queries = torch.full((4 * rows * repeats, kv_heads, size), 7.0).to(dtype)
            filled = [x.clone() for x in (keys, values, queries)]
            weights, around_one = [norm.weight for norm in norms], kind is qwen3_5.Qwen3_5RMSNorm
            out = rotate_append(q, k, v, cos, sin, weights, 1e-6, around_one, keys, values, newest, queries, starts)
            filled[0][newest], filled[1][newest] = expected[1], v
            for row, start in ((row, start) for of_rows in starts.tolist() for row, start in enumerate(of_rows)):
                if start >= 0:
                    filled[2][start : start + repeats] = expected[0][row].view(kv_heads, repeats, size).transpose(0, 1)
            found = zip(("q", "keys", "values", "queries"), (out, keys, values, queries), (expected[0], *filled))
            for name, got, right in found:
                report(f"rotation {dtype} {size} {rotary} {name}", got, right)
            alone = rotate_append(q, k, v, cos, sin, weights, 1e-6, around_one, keys, values, newest, None, None)
            assert torch.equal(alone, out)


def parts() -> None:
    """Rows with no piece, with one and with several; against merging one after the other."""
    rows, kv_heads, repeats, size = 5, 2, 3, 24
    for dtype in NUMBERS:
        for pieces in (1, 3, 200):
            results = torch.randn(rows * pieces * repeats, kv_heads, size).to(dtype)
            results_lse = 3 * torch.randn(kv_heads, rows * pieces * repeats)
            own = torch.randn(rows, kv_heads * repeats, size).to(dtype)
            own_lse = torch.randn(rows, kv_heads * repeats).t()
            starts = (torch.randperm(rows * pieces) * repeats).view(pieces, rows).int()
            starts[:, 1] = -1
            starts[1:, 2] = -1
            expected, expected_lse = own.float().clone(), own_lse.clone()
            for of_rows in starts:
                for row, start in enumerate(of_rows.tolist()):
                    if start >= 0:
                        part = results[start : start + repeats].transpose(0, 1).flatten(0, 1)[None]
                        part_lse = results_lse[:, start : start + repeats].flatten()[:, None]
                        one, one_lse = expected[row : row + 1], expected_lse[:, row : row + 1]
                        merge_(one, one_lse, part, part_lse)
            cut = own[None], own_lse[None]
            out, lse = merge_parts(*cut, results, results_lse, starts, torch.float32)
            report(f"parts {dtype} {pieces}", out, expected)
            report(f"parts-lse {dtype} {pieces}", lse, expected_lse)
            narrow, _ = merge_parts(*cut, results, results_lse, starts, dtype)
            report(f"parts-narrow {dtype} {pieces}", narrow, out.to(dtype))


def own() -> None:
    """Rows that fill some of their parts, other rows' starts and what lies behind a row's length are no numbers."""
    for dtype in NUMBERS:
        for heads, kv_heads, size, room in ((6, 2, 24, 600), (4, 4, 16, 64), (7, 1, 128, 300)):
            q = torch.randn(3, 2 * heads, size).to(dtype)[:, :heads]
            keys, values = (torch.randn(3, room, kv_heads, size).to(dtype) for _ in range(2))
            lengths = torch.tensor([1, room, room // 2 + 3], dtype=torch.int32)
            right, right_lse = OracleKernel().ragged_forward(q, keys, values, lengths, size**-0.5)
            for tensor in (keys, values):
                tensor[torch.arange(room) >= lengths[:, None]] = torch.nan
            parts, parts_lse = own_attention(q, keys, values, lengths, size**-0.5)
            assert torch.equal(parts_lse[:, 0] > -torch.inf, torch.arange(len(parts))[:, None] * 256 < lengths)
            parts.nan_to_num_(7.0)
            nothing = torch.empty(0, 3, dtype=torch.int32)
            none = (q[:0, :kv_heads], parts_lse[0, :kv_heads, :0])
            out, lse = merge_parts(parts, parts_lse, *none, nothing, dtype)
            report(f"own {dtype} {room}", out, right)
            report(f"own-lse {dtype} {room}", lse, right_lse)


def statistics() -> None:
    """Of flat rows, of one that is nearly certain, and of ones in which tokens cannot be drawn."""
    for dtype in NUMBERS:
        for temperature in (1.0, 0.7):
            logits = (3 * torch.randn(4, 9000)).to(dtype)
            logits[1, 5000] = 40
            logits[2, 100:8200] = -torch.inf
            logits[3, :5000] = -torch.inf
            tokens = torch.tensor([0, 5000, 8999, 8999])
            found, expected = (f(logits, temperature, tokens) for f in (token_statistics, policy_statistics))
            for name, got, right in zip(("logprobs", "entropies"), found, expected, strict=True):
                report(f"statistics {dtype} {temperature} {name}", got, right)


def logits_gradients() -> None:
    """Of the same rows, in chunks: hidden states are the logits, for the head is a unit matrix."""
    for dtype in NUMBERS:
        for temperature, entropy_graph in ((1.0, False), (0.7, False), (0.7, True)):
            logits = (3 * torch.randn(4, 5000)).to(dtype)
            logits[1, 4500] = 40
            logits[2, 100:4200] = -20000
            targets, unit = torch.tensor([0, 4500, 4999, 4097]), torch.eye(5000, dtype=dtype)
            upstream = [torch.randn(4) for _ in range(1 + entropy_graph)]
            for weight, path in ((unit, "product"), (None, "chunks"))[: 1 if entropy_graph else 2]:
                found = []
                for fused in (True, False):
                    leaf = logits.clone().requires_grad_()
                    with torch.enable_grad():
                        outputs = token_logprobs(
                            lambda x: x * 1, leaf, targets, temperature, 3, 1, entropy_graph, weight, fused
                        )
                        differentiable = outputs[: 1 + entropy_graph]
                        found.append((*outputs, *torch.autograd.grad(differentiable, leaf, upstream)))
                for name, got, right in zip(("logprobs", "entropies", "gradient"), *found, strict=True):
                    report(f"{path} {dtype} {temperature} {entropy_graph} {name}", got.detach(), right.detach())
    print(f"comparison logits: {judged(torch.device('cpu'), torch.float16)}")


def drawing() -> None:
    """Of rows in which a token is certain or most cannot be drawn, at both ends of what is uniform."""
    for dtype in NUMBERS:
        for count in (400, 9000):
            scores = (3 * torch.randn(12, count)).to(dtype)
            scores[:, 7], scores[0, :-1], scores[1, : count // 2], scores[2, count // 2 :] = (-torch.inf,) * 4
            scores[3, count // 3] = 60
            uniform = torch.rand(12, dtype=torch.float64)
            uniform[3:6] = torch.tensor([0, 0, 1 - 2**-53])
            found, expected = draw_tokens(scores, uniform), draw(scores.float(), uniform)
            for name, got, right in zip(("tokens", "logprobs"), found, expected, strict=True):
                report(f"drawing {dtype} {count} {name}", got, right)
        scores[0, 3], uniform[2] = torch.nan, 1 - 2**-53  # which must not end where nothing can be drawn
        tokens, logprobs = draw_tokens(scores, uniform)
        assert tokens[0] < count and logprobs[0].isnan() and not logprobs[1:].isnan().any()


def comparisons() -> None:
    dtype = torch.float16
    for family in ("qwen3_vl", "qwen3_5"):
        policy = tiny_policy(family=family, dtype=dtype)
        print(f"comparison {family}: {choice.judged(policy.language_model, policy.device, dtype)}")
    choice.KERNELS = ("norms", "gates")
    policy = tiny_policy(family="qwen3_vl", dtype=torch.float16)
    for module in policy.language_model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data = torch.rand(module.weight.shape).half()
            one_rounding(module)
    print(f"comparison one rounding: {choice.judged(policy.language_model, policy.device, dtype)}")
    policy = tiny_policy(family="qwen3_vl", dtype=dtype)
    for layer in policy.language_model.layers:
        layer.mlp.__class__ = type("OneMore", (type(layer.mlp),), {"forward": one_more})
    print(f"comparison one more: {choice.judged(policy.language_model, policy.device, dtype)}")


def one_rounding(norm: Any) -> None:
    wide = copy.deepcopy(norm).float()
    norm.forward = lambda x: wide(x.float()).to(x.dtype)


def one_more(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Another layer of three projections."""
    return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    norms()
    sums()
    gates()
    rotations()
    parts()
    own()
    statistics()
    logits_gradients()
    drawing()
    comparisons()


if __name__ == "__main__":
    main()
