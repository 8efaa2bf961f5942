"""The machine of the check: processor, GPU, driver, packages that may lack, commit. Nothing here imports torch, but the
program, ``python -m scripts.bench.gpu_check.machine FILE.json``: findings of ``vlm-pg doctor`` and torch's device.
"""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, host_bytes
from vlm_pg.threads import usable_cores

# Imported name: (name to install, what does not work here without it).
KNOWN: dict[str, tuple[str, str]] = {
    "torch": ("torch", "nothing of the check"),
    "transformers": ("transformers", "nothing of the check but the environment"),
    "pydantic": ("pydantic", "nothing of the check but the environment"),
    "jinja2": ("jinja2", "no page; result.json holds everything"),
    "pytest": ("pytest", "no tests"),
    "hypothesis": ("hypothesis", "no tests"),
    "av": ("av", "no video: no training run"),
    "qwen_vl_utils": ("qwen-vl-utils", "no frame counts and sizes: no training run"),
    "requests": ("requests", "qwen-vl-utils does not import: no training run"),
    "torchvision": ("torchvision", "no video processor: no training run"),
    "xxhash": ("xxhash", "no digests of towers: no training run"),
    "rich": ("rich", "no console: no training run"),
    "yaml": ("pyyaml", "no configuration: no training run"),
    "peft": ("peft", "no LoRA: no whole step of 7B"),
    "prefix_grouper": ("prefix-grouper", "no comparison with it"),
    "flash_attn": ("flash-attn", "transformers runs on torch's own attention instead of flash_attention_2"),
    "liger_kernel": ("liger-kernel", "no fused norms and activations (model.liger)"),
    "deepspeed": ("deepspeed", "no training.engine=deepspeed; one GPU needs none"),
    "decord": ("decord", "no media.decoder=decord; PyAV reads every video"),
    "datasets": ("datasets", "no prepared Parquet sets; JSON lines are read without"),
    "math_verify": ("math-verify", "no rewards for mathematics"),
    "jiwer": ("jiwer", "no rewards for OCR"),
    "rouge_score": ("rouge-score", "no rewards for free-form answers"),
}
NEEDED = ("torch", "transformers", "pydantic")
REPOSITORY = Path(__file__).parents[3]
_ASKED = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory")


def describe(python_path: Sequence[str]) -> dict[str, Any]:
    """Machine, driver, versions of all packages and commit.

    Args:
        python_path: folders of packages that the check was given.
    """
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": usable_cores(),
        "memory_gib": round(host_bytes() / GIB, 1),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / GIB, 1),
        "python": f"{platform.python_version()} at {sys.executable}",
        "python_path": list(python_path),
        "gpus": gpus(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "commit": commit(),
        "packages": installed(),
    }


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; none where there is no nvidia-smi, or it fails."""
    lines = _said("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader")
    return [dict(zip(_ASKED, [part.strip() for part in line.split(",")])) for line in lines]


def torch_sees_gpu(python_path: Sequence[str]) -> bool:
    """For machines without nvidia-smi; asked of a process of its own, so that this one holds nothing of the GPU."""
    code = "import torch; print(torch.cuda.is_available())"
    path = os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")])
    return _said(sys.executable, "-c", code, PYTHONPATH=path)[-1:] == ["True"]


def commit() -> str | None:
    """Of the checkout that this package lies in, "+changes" where files differ from it; None outside of git."""
    git = ("git", "-C", str(REPOSITORY))
    name = _said(*git, "rev-parse", "HEAD")
    if not name:
        return None
    return name[0] + ("+changes" if _said(*git, "status", "--porcelain", "--untracked-files=no") else "")


def _said(*command: str, **environment: str) -> list[str]:
    """Lines that a command prints; none where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def is_there(module: str) -> bool:
    """Whether it can be found; it is not imported, which may still fail."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def missing(modules: Iterable[str]) -> list[str]:
    """Those that cannot be found."""
    return [module for module in modules if not is_there(module)]


def missing_words(modules: Iterable[str]) -> str:
    """ "av (pip install av) is not installed": the reason why a stage is left out."""
    names = [KNOWN.get(module, (module, ""))[0] for module in modules]
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed. Install with pip, or carry wheels "
        "along and name their folder with --wheels"
    )


def installed() -> dict[str, str]:
    """Version of every package that Python finds; of a name that is there twice the first, as an import takes it."""
    found: dict[str, str] = {}
    for package in distributions():
        name = package.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), package.version)
    return dict(sorted(found.items()))


def install_wheels(folder: Path) -> Path:
    """A new folder for PYTHONPATH with all wheels of ``folder`` in it, installed without a network and as they are; it
    goes when this process ends.

    Raises:
        ConfigError: no wheels there, or pip refuses them (of another Python or machine, or one of them twice).
    """
    wheels = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"--wheels got {folder}, in which there is no file *.whl. Name the folder that holds them.")
    site = tempfile.mkdtemp(prefix="vlm-pg-wheels-")
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, site, *wheels], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"--wheels {folder}: pip could not install them for {sys.executable} ({last}). Wheels must be of this "
            "Python and machine, one version of each; pip download has --python-version, --platform and --only-binary."
        )
    return Path(site)


def main(argv: Sequence[str]) -> int:
    """Write findings of ``vlm-pg doctor`` and torch's device into the file that ``argv`` names.

    It ends with 1 only where nothing of the check can run.
    """
    from vlm_pg.doctor import findings
    from vlm_pg.files import write_json_atomic

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
