"""Our Triton kernels, as launched for real sizes, fit every GPU: shared memory of a block, no register spilled.

Triton compiles for GPUs that are not here, and its ptxas says what the machine code takes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled_kernels import compiled

pytest.importorskip("triton")

# KiB of shared memory that one block may have (CUDA C++ Programming Guide, technical specifications).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def launches() -> list[tuple[str, dict[str, Any], int]]:
    """Kernel, constants and warps: widths from 0.5B to 72B models, all head sizes, vocabularies of any size."""
    from vlm_pg.models import fused_logits
    from vlm_pg.rollout.fused import attention, drawing, norms
    from vlm_pg.rollout.fused.delta_rule import COLUMNS

    found: list[tuple[str, dict[str, Any], int]] = []
    for width in (64, 128, 256, 896, 2048, 3584, 5120, 8192):
        room = 1 << (width - 1).bit_length()
        rows = max(1, norms.HELD // room)
        constants = {"WIDTH": width, "ROOM": room, "ROWS": rows, "AROUND_ONE": width == 256}
        for adds in ({"ADDS": True}, {"ADDS": False, "residual": None, "total": None}):
            found.append(("rollout.fused.norms.normed_rows", constants | adds, norms.warps(room * rows)))
    for size, half in ((64, 32), (128, 64), (256, 32)):
        rest = 1 << (max(1, size - 2 * half) - 1).bit_length()
        heads = {"N": 64, "K": 8, "HALF": half, "SIZE": size, "ROOM": half, "REST": rest}
        for normed in ({"NORM": 1}, {"NORM": 2}, {"NORM": 0, "q_weight": None, "k_weight": None}):
            for pieces in ({"PIECES": 16}, {"PIECES": 0, "queries": None, "starts": None}):
                found.append(("rollout.fused.rotation.appended", heads | normed | pieces, norms.warps(size)))
        for repeats, pieces in ((1, 1), (8, attention.HELD // size)):
            constants = {"N": 8 * repeats, "REPEATS": repeats, "SIZE": size, "ROOM": size, "PARTS": 8, "PIECES": pieces}
            found.append(("rollout.fused.attention.merged_head", constants, 4))
        for repeats, width in ((1, 2), (7, 2), (16, 2), (7, 4)):  # the last in fp32
            block = min(32, max(16, attention.BLOCK_BYTES // (size * width)))
            constants = {"KEYS": attention.PART_KEYS, "K": 4, "REPEATS": repeats, "HEADS": 16, "SIZE": size}
            kernel = "rollout.fused.attention.attended_part" + (" fp32" if width == 4 else "")
            found.append((kernel, constants | {"BLOCK": block, "ROOM": size}, attention.PART_WARPS))
    found.append(("rollout.fused.norms.gated", {"WIDTH": 18944, "NUMBERS": 1024}, 4))
    runs = {"RUN": drawing.RUN, "RUNS": drawing.RUNS}
    found += [("rollout.fused.drawing.run_sums", runs, 4), ("rollout.fused.drawing.drawn", runs | {"ROOM": 1024}, 4)]
    numbers = {"NUMBERS": fused_logits.NUMBERS}
    found.append(("models.fused_logits.row_statistics", numbers, 8))
    for entropies in (True, False):
        found.append(("models.fused_logits.row_gradients", numbers | {"ENTROPIES": entropies}, 8))
    delta = {"KEY": 128, "VALUE": 128, "KEY_ROOM": 128, "COLUMNS": COLUMNS}
    return [*found, ("rollout.fused.delta_rule.one_token", delta, 4)]


OTHERS = [pytest.param(capability, marks=pytest.mark.matrix) for capability in SHARED_KIB if capability != 86]


@pytest.mark.parametrize("capability", [86, *OTHERS])
def test_every_kernel_fits(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    ptxas, machine = compiler.get_ptxas(capability).path, compiler.sm_arch_from_capability(capability)
    for kernel, constants, warps in launches():
        place, _, wide = kernel.partition(" ")
        stages = 2 if place.endswith("attended_part") else 3
        found = compiled(
            place, constants, capability, tmp_path, monkeypatch, bool(wide), num_warps=warps, num_stages=stages
        )
        assert found.metadata.shared <= SHARED_KIB[capability] * 1024, (kernel, constants)
        (tmp_path / "kernel.ptx").write_text(found.asm["ptx"])
        command = [ptxas, "-v", f"--gpu-name={machine}", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert spilled == [("0", "0", "0")], (kernel, constants, said)
