"""Our Triton kernels compiled for GPUs that are not here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

POINTERS = {
    "*fp32": (
        *("own_lse", "parts_lse", "out_lse", "logprobs", "entropies", "state", "log_decay", "scores", "sums", "tops"),
        *("negated", "negated_entropies", "of_entropies"),
    ),
    "*bf16": (
        *("x", "residual", "weight", "total", "out", "gate", "up", "q", "k", "v", "q_weight", "k_weight", "cos", "sin"),
        *("q_out", "keys", "values", "queries", "own", "parts", "logits", "of_tokens", "query", "key", "value", "beta"),
    ),
    "*i32": ("starts", "lengths"),
    "*i64": ("tokens", "newest"),
    "*fp64": ("uniform",),
    "fp32": ("epsilon", "temperature", "scale"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}


def compiled(
    kernel: str,
    constants: dict[str, Any],
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_fp32: bool = False,
    is_aligned: bool = False,
    **options: Any,
) -> Any:
    """Triton's result.

    Args:
        kernel: "rollout.fused.norms.normed_rows", for example, in ``vlm_pg``.
        constants: values of its constant arguments.
        folder: for Triton's cache.
        is_fp32: numbers that are in bf16 as a rule are in fp32.
        is_aligned: pointers are multiples of 16 bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    file, name = kernel.rsplit(".", 1)
    function = getattr(importlib.import_module(f"vlm_pg.{file}"), name)
    signature = {arg: TYPES.get(arg, "i32") for arg in function.arg_names} | dict.fromkeys(constants, "constexpr")
    if name in ("one_token", "attended_part"):
        signature["out"] = "*fp32"
    if is_fp32:
        signature |= {arg: "*fp32" for arg, kind in signature.items() if kind == "*bf16"}
    pointers = [index for index, arg in enumerate(function.arg_names) if signature[arg].startswith("*")]
    aligned = {(index,): [["tt.divisibility", 16]] for index in pointers} if is_aligned else None
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    target, given = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False, **options}
    return triton.compile(source, target=target, options=given)
