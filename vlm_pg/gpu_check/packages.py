"""What a bare machine may lack, and what does not work without it."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from vlm_pg.errors import ConfigError

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
