"""``python -m vlm_pg.gpu_check.environment FILE.json``: what ``vlm-pg doctor`` finds, and torch's device.

It ends with 1 only where nothing of the check can run. A package of the project that is not there, or of another
version, is a remark: stages that need it are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlm_pg.doctor import findings
from vlm_pg.files import write_json_atomic
from vlm_pg.gpu_check.packages import KNOWN, missing
from vlm_pg.memory import GIB

NEEDED = ("torch", "transformers", "pydantic")


def main(argv: Sequence[str]) -> int:
    found = list(findings())
    for finding in found:
        print(f"{finding.status:8} {finding.name:21} {finding.detail}")
    lacking = {KNOWN[name][0]: KNOWN[name][1] for name in missing(KNOWN)}
    for name, what in lacking.items():
        print(f"not installed: {name}: {what}")
    device = _device()
    print(f"torch's device: {device}")
    write_json_atomic(
        Path(argv[0]), {"findings": [asdict(one) for one in found], "not_installed": lacking, "device": device}
    )
    return 1 if missing(NEEDED) or "problem" in device else 0


def _device() -> dict[str, Any]:
    """Type and name of the device that runs will take; a GPU is made to compute something."""
    try:
        import torch

        if not torch.cuda.is_available():
            return {"type": "cpu", "torch": torch.__version__, "cuda": torch.version.cuda}
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        total = float((ones @ ones).float().sum())
        if total != 256.0**3:
            return {"type": "cuda", "problem": f"a product of ones summed to {total:g} and not to {256**3}"}
        properties = torch.cuda.get_device_properties(0)
        return {
            "type": "cuda",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / GIB, 1),
            "multiprocessors": properties.multi_processor_count,
            "count": torch.cuda.device_count(),
        }
    except (ImportError, OSError, RuntimeError) as error:
        return {"type": "none", "problem": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
