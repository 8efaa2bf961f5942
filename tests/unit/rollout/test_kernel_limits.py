"""Our Triton kernels, as launched for real sizes, fit every GPU: shared memory of a block, no register spilled.

Triton compiles for GPUs that are not here, and its ptxas says what the machine code takes.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

# KiB of shared memory that one block may have (CUDA C++ Programming Guide, technical specifications).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

POINTERS = {
    "*fp32": ("own_lse", "parts_lse", "out_lse", "logprobs", "entropies", "state", "log_decay"),
    "*bf16": (
        *("x", "weight", "out", "gate", "up", "q", "k", "cos", "sin", "q_out", "k_out", "own", "parts", "logits"),
        *("query", "key", "value", "beta"),
    ),
    "*i32": ("places",),
    "*i64": ("tokens",),
    "fp32": ("epsilon", "temperature", "scale"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}


def launches() -> list[tuple[str, dict[str, Any], int]]:
    """Kernel, constants and warps: widths from 0.5B to 72B models, all head sizes, vocabularies of any size."""
    from vlm_pg.rollout.delta_triton import COLUMNS
    from vlm_pg.rollout.fused import norm, parts, statistics

    found: list[tuple[str, dict[str, Any], int]] = []
    for width in (64, 128, 256, 896, 2048, 3584, 5120, 8192):
        room = 1 << (width - 1).bit_length()
        rows = max(1, norm.HELD // room)
        constants = {"WIDTH": width, "ROOM": room, "ROWS": rows, "AROUND_ONE": width == 256}
        found.append(("fused.norm.normed_rows", constants, norm.warps(room * rows)))
    for size, half in ((64, 32), (128, 64), (256, 32)):
        rest = size - 2 * half
        constants = {"N": 64, "K": 8, "HALF": half, "SIZE": size, "ROOM": half, "REST": rest and 256}
        found.append(("fused.rotation.rotated", constants, norm.warps(size)))
        for repeats, pieces in ((1, 1), (8, parts.HELD // size)):
            constants = {"N": 8 * repeats, "REPEATS": repeats, "SIZE": size, "ROOM": size, "PIECES": pieces}
            found.append(("fused.parts.merged_head", constants, 4))
    found.append(("fused.gate.gated", {"NUMBERS": 1024}, 4))
    found.append(("fused.statistics.row_statistics", {"NUMBERS": statistics.NUMBERS}, 8))
    delta = {"KEY": 128, "VALUE": 128, "KEY_ROOM": 128, "COLUMNS": COLUMNS}
    return [*found, ("delta_triton.one_token", delta, 4)]


OTHERS = [pytest.param(capability, marks=pytest.mark.matrix) for capability in SHARED_KIB if capability != 86]


@pytest.mark.parametrize("capability", [86, *OTHERS])
def test_every_kernel_fits(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptxas, machine = compiler.get_ptxas(capability).path, compiler.sm_arch_from_capability(capability)
    for kernel, constants, warps in launches():
        file, name = kernel.rsplit(".", 1)
        function = getattr(importlib.import_module(f"vlm_pg.rollout.{file}"), name)
        signature = {arg: TYPES.get(arg, "i32") for arg in function.arg_names} | dict.fromkeys(constants, "constexpr")
        if name == "one_token":
            signature["out"] = "*fp32"
        source = ASTSource(fn=function, signature=signature, constexprs=constants)
        options = {"enable_fp_fusion": False, "num_warps": warps}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= SHARED_KIB[capability] * 1024, (kernel, constants)
        (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
        command = [ptxas, "-v", f"--gpu-name={machine}", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert spilled == [("0", "0", "0")], (kernel, constants, said)
