"""Our Triton kernels as compiled for GPUs that are not here: roundings, shared memory of a block, no register spilled.

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


@pytest.mark.parametrize(
    ("capability", "every"), [(86, 9), *(pytest.param(c, 1, marks=pytest.mark.matrix) for c in SHARED_KIB)]
)
def test_every_kernel_fits(capability: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shared memory is least; in the usual tests every ninth launch."""
    from triton.backends.nvidia import compiler

    ptxas, machine = compiler.get_ptxas(capability).path, compiler.sm_arch_from_capability(capability)
    for kernel, constants, warps in launches()[::every]:
        name, _, wide = kernel.partition(" ")
        stages = 2 if name.endswith("attended_part") else 3
        options = {"num_warps": warps, "num_stages": stages}
        found = compiled(name, constants, capability, tmp_path, monkeypatch, bool(wide), **options)
        assert found.metadata.shared <= SHARED_KIB[capability] * 1024, (kernel, constants)
        (tmp_path / "kernel.ptx").write_text(found.asm["ptx"])
        command = [ptxas, "-v", f"--gpu-name={machine}", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", printed)
        assert spilled == [("0", "0", "0")], (kernel, constants, printed)


CAPABILITIES = [90, *(pytest.param(c, marks=pytest.mark.matrix) for c in (80, 89, 100, 120))]
ALONE = {"residual": None, "total": None, "ADDS": False}
WIDTHS = {"WIDTH": 3584, "ROOM": 4096, "ROWS": 1, "AROUND_ONE": False}
HEADS = {"N": 32, "K": 8, "HALF": 64, "SIZE": 128, "ROOM": 64, "REST": 1, "PIECES": 16}
PARTLY = {"N": 16, "K": 4, "HALF": 32, "SIZE": 256, "ROOM": 32, "REST": 256, "PIECES": 16}
MERGED = {"N": 32, "REPEATS": 4, "SIZE": 128, "ROOM": 128, "PARTS": 1, "PIECES": 16}
OWN = {"KEYS": 256, "K": 4, "REPEATS": 7, "HEADS": 16, "SIZE": 128, "ROOM": 128, "BLOCK": 32}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "kernel, constants, written, rounded",
    [
        ("norms.normed_rows", WIDTHS | ALONE, 2, 32),
        ("norms.normed_rows", WIDTHS | {"ADDS": True}, 3, 32),
        ("norms.normed_rows", {"WIDTH": 128, "ROOM": 128, "ROWS": 16, "AROUND_ONE": True} | ALONE, 1, 16),
        ("norms.gated", {"WIDTH": 18944, "NUMBERS": 1024}, 2, 8),
        ("rotation.appended", HEADS | {"q_weight": None, "k_weight": None, "NORM": 0}, 12, 2),
        ("rotation.appended", PARTLY | {"NORM": 2}, 18, 10),
        ("rotation.appended", HEADS | {"NORM": 1, "queries": None, "starts": None, "PIECES": 0}, 20, 6),
        ("attention.merged_head", MERGED | {"PARTS": 8}, 1, 1),
        # Probabilities of 16 heads and 32 tokens, two to an instruction.
        ("attention.attended_part", OWN, 1, 2),
        ("attention.attended_part", OWN | {"REPEATS": 4, "SIZE": 256, "ROOM": 256, "BLOCK": 16}, 1, 2),
        ("drawing.run_sums", {"RUN": 256, "RUNS": 16}, 0, 0),
        ("drawing.drawn", {"RUN": 256, "RUNS": 16, "ROOM": 1024}, 0, 0),
        ("fused_logits.row_statistics", {"NUMBERS": 4096}, 0, 0),
        ("fused_logits.row_gradients", {"ENTROPIES": True, "NUMBERS": 4096}, 1, 32),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_roundings(
    kernel: str, constants: dict[str, Any], written: int, rounded: int, capability: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rounded to nearest, no product fused with a sum, nothing spilled to memory; which roundings are left out.

    ``written``: roundings in the kernel's code; ``rounded``: of a thread's numbers in machine code.
    """
    folder = "models" if kernel.startswith("fused_logits") else "rollout.fused"
    found = compiled(f"{folder}.{kernel}", constants, capability, tmp_path, monkeypatch).asm
    code = found["ptx"]
    assert not re.search(r"cvt\.r[zmp]\w*\.bf16", code)
    assert "fma.rn.f32" not in code and ".local" not in code
    assert found["ttir"].count("arith.truncf") == written
    assert len(re.findall(r"cvt\.rn\.bf16", code)) == rounded


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_delta_rule_loads_and_stores_each_state_once(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm_pg.rollout.fused.delta_rule import COLUMNS

    constants = {"KEY": 128, "VALUE": 128, "KEY_ROOM": 128, "COLUMNS": COLUMNS}
    kernel = "rollout.fused.delta_rule.one_token"
    code = compiled(kernel, constants, capability, tmp_path, monkeypatch, is_aligned=True).asm["ptx"]
    floats_of_a_thread = 128 * COLUMNS // (4 * 32)
    for way in ("ld", "st"):
        assert len(re.findall(rf"{way}\.global[\w.]*\.v4\.[bf]32", code)) == floats_of_a_thread // 4
    assert ".local" not in code
