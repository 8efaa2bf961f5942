"""liger-kernel's kernels as we use them, run by Triton's interpreter beside transformers' own code; a script.

Triton decides at import whether kernels are interpreted, so this is a process of its own with TRITON_INTERPRET=1. It
prints what the comparison before use says of some models, then one JSON object: of each comparison the largest
difference, relative to the largest value.

fp32 and fp16, whose arithmetic numpy has. Not bf16: the interpreter keeps such numbers as 16-bit integers and
computes with those wherever a kernel does not widen them first, as these kernels do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.support.tiny import VL_FAMILY_NAMES, tiny_model
from vlm_pg.models import liger
from vlm_pg.models.liger_layers import FORWARDS, rotate, rotate_patches


def complete_interpreter() -> None:
    """On a GPU a Python float arrives in a kernel as an fp32 scalar; the interpreter leaves it a float, which has no
    ``to``."""
    given = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return given(arg)

    interpreter._implicit_cvt = converted
    # The libraries of a GPU's maker are not there; the language's own function does the same.
    for name in ("rms_norm", "layer_norm"):
        import_module(f"liger_kernel.ops.{name}").rsqrt = lambda x: tl.rsqrt(x)


def difference(got: Any, expected: Any) -> float:
    """Over outputs and gradients."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(got, expected, strict=True)
    )


def with_gradients(run: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    # A kernel that works in place may do so with what is a leaf's product, as in a layer.
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = run(*(x * 1 for x in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum() for out in outputs)
    return [*(out.detach().clone() for out in outputs), *torch.autograd.grad(loss, leaves)]


def rotations(dtype: torch.dtype, families: Sequence[str]) -> Iterator[tuple[str, float]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    for family in families:
        modeling = import_module(f"transformers.models.{family}.modeling_{family}")
        # Qwen3.5 rotates the first quarter of a head.
        width = 4 if family == "qwen3_5" else 16
        for rows, heads, kv_heads in ((7, 6, 2), (1, 3, 1)):
            angles = torch.randn(1, rows, width // 2).repeat(1, 1, 2)
            q, k = (random(1, rows, count, 16) for count in (heads, kv_heads))
            results = [
                with_gradients(
                    lambda q, k, by=by, angles=angles: by(
                        q.transpose(1, 2), k.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype)
                    ),
                    [q, k],
                )
                for by in (rotate, modeling.apply_rotary_pos_emb)
            ]
            yield f"rotation of {family}, {rows} rows", difference(*results)
        if hasattr(modeling, "apply_rotary_pos_emb_vision"):
            angles, patches = torch.randn(7, 8).repeat(1, 2), [random(7, 3, 16), random(7, 3, 16)]
            results = [
                with_gradients(lambda q, k, by=by, angles=angles: by(q, k, angles.cos(), angles.sin()), patches)
                for by in (rotate_patches, modeling.apply_rotary_pos_emb_vision)
            ]
            yield f"rotation of patches of {family}", difference(*results)


def modules(dtype: torch.dtype, families: Sequence[str]) -> Iterator[tuple[str, float]]:
    for family in families:
        if family not in VL_FAMILY_NAMES:
            continue
        model = tiny_model(family).to(dtype)
        seen = set()
        for module in model.modules():
            for part in liger._parts(model):
                forwards = [by for fits, by in [FORWARDS[part]] if fits(module)] if part in FORWARDS else []
                kind = type(module).__name__
                if not forwards or kind in seen:
                    continue
                seen.add(kind)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.copy_(torch.randn(parameter.shape))
                width = next(module.parameters()).shape[-1]
                weights = list(module.parameters())
                x = torch.randn(2, 5, width).to(dtype)
                results = []
                for by in (forwards[0], type(module).forward):
                    leaf = x.clone().requires_grad_()
                    out = by(module, leaf * 1)
                    generator = torch.Generator().manual_seed(1)
                    upstream = torch.randn(out.shape, generator=generator).to(dtype)
                    results.append([out.detach().clone(), *torch.autograd.grad(out, [leaf, *weights], upstream)])
                yield f"{kind} of {family}", difference(*results)


def main() -> None:
    torch.manual_seed(0)
    complete_interpreter()
    everything = sys.argv[1] == "all"
    families = ["qwen2_vl", "qwen3_5"] + (["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3"] if everything else [])
    found = {}
    for dtype in (torch.float32, torch.float16) if everything else (torch.float32,):
        for comparisons in (rotations, modules):
            found.update({f"{name}, {dtype}": error for name, error in comparisons(dtype, families)})
    liger._MANY_ROWS = 80  # as many as it takes for another kernel would take minutes
    narrow, wide = torch.float16, torch.float32
    judged = (("qwen2_vl", narrow), ("qwen3_vl", narrow), ("qwen3_5", narrow), ("qwen2_5_vl", wide))
    for family, dtype in judged if everything else ():
        print(f"judged {family} {dtype}: {liger.judged(tiny_model(family).to(dtype))}")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
