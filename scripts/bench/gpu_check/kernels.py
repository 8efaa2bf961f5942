"""The attention self-check at real head sizes: ``python -m scripts.bench.gpu_check.kernels DEVICE DTYPE FILE.json``.

Every kernel that runs here against plain softmax. A kernel that differs, or raises, is a failure; the others are
checked all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.attention.kernels import available, select_kernel
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.files import write_json_atomic
from vlm_pg.models.loading import DTYPES
from vlm_pg.plan.shape import PUBLISHED

# Query heads, key-value heads, head dimension of each published model, once each.
HEADS = sorted({(shape.heads, shape.kv_heads, shape.head_dim) for shape in PUBLISHED.values()})
# Compared with itself it says nothing.
_ORACLE = "oracle"


def main(argv: Sequence[str]) -> int:
    device, dtype, path = torch.device(argv[0]), DTYPES[argv[1]], Path(argv[2])
    torch.manual_seed(0)
    reasons = available(device, dtype)
    chosen = select_kernel(device, dtype).name
    checks = [
        _check(name, device, dtype, heads)
        for name, reason in reasons.items()
        if reason is None and name != _ORACLE
        for heads in HEADS
    ]
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in left_out.items():
        print(f"{name}: does not run here, {reason}")
    write_json_atomic(
        path, {"device": argv[0], "dtype": argv[1], "chosen": chosen, "checks": checks, "not_here": left_out}
    )
    return 1 if any("failed" in check for check in checks) else 0


def _check(name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kernel": name, "heads": list(heads)}
    try:
        entry["worst"] = check_kernel(select_kernel(device, dtype, name), device, dtype, *heads)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # an error of CUDA is a RuntimeError
        entry["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    print(f"{name}, heads {heads}: {entry.get('failed') or format(entry['worst'], '.1e')}", flush=True)
    return entry


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
