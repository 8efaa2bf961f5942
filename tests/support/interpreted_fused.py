"""A process of its own, for Triton's interpreter: the kernels of ``rollout/fused`` against torch's operators.

Prints a line for each case: its name, the share of numbers that are not equal, the largest error of any. Then what the
comparison before use says of four families, of a norm that multiplies before it rounds, and of feed-forward layers that
only look like those of the families.
"""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tests.support.groups import tiny_policy
from vlm_pg.attention.merge import merge_
from vlm_pg.models.fused_logits import token_statistics
from vlm_pg.models.logits import judged, token_logprobs
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.fused.gate import silu_mul
from vlm_pg.rollout.fused.norm import rms_norm
from vlm_pg.rollout.fused.parts import merge_parts
from vlm_pg.rollout.fused.rotation import rotate
from vlm_pg.rollout.sampling import policy_statistics

# Not bfloat16, which the interpreter cuts off where a GPU rounds.
NUMBERS = (torch.float32, torch.float16)


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


def rotations() -> None:
    for dtype in NUMBERS:
        for size, turned in ((16, 16), (24, 24), (40, 16), (128, 128)):
            q, k = (torch.randn(1, 3, heads, 2 * size).to(dtype)[..., :size].transpose(1, 2) for heads in (4, 2))
            angles = torch.randn(1, 3, turned // 2).repeat(1, 1, 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            theirs = apply_rotary_pos_emb if turned == size else qwen3_5.apply_rotary_pos_emb
            for name, got, expected in zip("qk", rotate(q, k, cos, sin), theirs(q, k, cos, sin), strict=True):
                report(f"rotation {dtype} {size} {turned} {name}", got, expected)


def parts() -> None:
    """Rows with no piece, with one and with several; against merging one after the other."""
    rows, kv_heads, repeats, size = 5, 2, 3, 24
    for dtype in NUMBERS:
        for pieces in (1, 3, 200):
            results = torch.randn(rows * pieces * repeats, kv_heads, size).to(dtype)
            results_lse = 3 * torch.randn(kv_heads, rows * pieces * repeats)
            own = torch.randn(rows, kv_heads * repeats, size).to(dtype)
            own_lse = torch.randn(rows, kv_heads * repeats).t()
            places = (torch.randperm(rows * pieces) * repeats).view(pieces, rows).int()
            places[:, 1] = -1
            places[1:, 2] = -1
            expected, expected_lse = own.float().clone(), own_lse.clone()
            for of_rows in places:
                for row, place in enumerate(of_rows.tolist()):
                    if place >= 0:
                        part = results[place : place + repeats].transpose(0, 1).flatten(0, 1)[None]
                        part_lse = results_lse[:, place : place + repeats].flatten()[:, None]
                        one, one_lse = expected[row : row + 1], expected_lse[:, row : row + 1]
                        merge_(one, one_lse, part, part_lse)
            out, lse = merge_parts(own, own_lse, results, results_lse, places, torch.float32)
            report(f"parts {dtype} {pieces}", out, expected)
            report(f"parts-lse {dtype} {pieces}", lse, expected_lse)
            narrow, _ = merge_parts(own, own_lse, results, results_lse, places, dtype)
            report(f"parts-narrow {dtype} {pieces}", narrow, out.to(dtype))


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


def comparisons() -> None:
    dtype = torch.float16
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"):
        policy = tiny_policy(family=family, dtype=dtype)
        print(f"comparison {family}: {choice.judged(policy.language_model, policy.device, dtype)}")
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
    gates()
    rotations()
    parts()
    statistics()
    logits_gradients()
    comparisons()


if __name__ == "__main__":
    main()
