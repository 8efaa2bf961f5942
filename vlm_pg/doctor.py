"""``vlm-pg doctor``: checks of this machine, with a remedy for what is missing; and how checks are printed."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from vlm_pg.memory import GIB, host_bytes
from vlm_pg.observe.text import visible
from vlm_pg.threads import usable_cores
from vlm_pg.versions import version_of

Status = Literal["ok", "note", "missing", "failed"]
INSTALL = "Run bash scripts/train_video.sh, which installs it, or pip install -c constraints.txt -e ."
MIN_PYTHON = (3, 11)
MIN_FREE_GIB = 5.0
_MARKS: dict[Status, str] = {"ok": "ok     ", "note": "note   ", "missing": "MISSING", "failed": "FAILED "}

_PACKAGE = "vlm-pg"
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# Checked by an import.
_DECODERS = ("av", "decord")
_TRACKER = "Optional, for observe.trackers=[{0}]: pip install {1}."
_OPTIONAL = {
    "torchcodec": "Optional, for media.decoder=torchcodec: pip install torchcodec. It loads an FFmpeg of the system.",
    "tensorboard": "Set observe.trackers=[], or pip install tensorboard.",
    "wandb": _TRACKER.format("wandb", "wandb"),
    "swanlab": _TRACKER.format("swanlab", "swanlab"),
    "mlflow-skinny": _TRACKER.format("mlflow", "mlflow-skinny sqlalchemy alembic"),
    "flash-attn": "Optional, for the vision tower on a GPU: pip install flash-attn. torch's own serves else.",
}
# The client package and the complete one.
_ALSO_AS = {"mlflow-skinny": "mlflow"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy``: what to do unless it is ``ok``, if ``detail`` does not say it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def run_doctor() -> bool:
    """Print every finding; True if nothing that is required is missing."""
    return print_findings(findings(), "Ready.", "Not ready: a required part is missing, see above.")


def print_findings(findings: Iterable[Finding], passed: str, failed: str) -> bool:
    """Print each finding once it is there, and a last line; True if nothing is missing and nothing failed."""
    good = True
    for finding in findings:
        good = good and finding.status in ("ok", "note")
        print(visible(f"{_MARKS[finding.status]} {finding.name:21} {finding.detail}"), flush=True)
        if finding.remedy:
            print(f"        {'':21} -> {finding.remedy}", flush=True)
    print(passed if good else failed)
    return good


def findings() -> Iterator[Finding]:
    """All checks, in the order in which they are printed."""
    yield from _machine()
    yield from _packages()
    yield from _decoders()
    yield from _devices_and_kernels()


def _machine() -> Iterator[Finding]:
    version_ok = sys.version_info >= MIN_PYTHON
    yield Finding(
        "python",
        "ok" if version_ok else "missing",
        f"{platform.python_version()} at {sys.executable}",
        "" if version_ok else "Python 3.11 or newer is needed: remove .venv and run the script with a newer python3.",
    )
    yield Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")
    yield Finding("memory", "ok", f"{host_bytes() / GIB:.1f} GiB in all")
    free_gib = shutil.disk_usage(Path.cwd()).free / GIB
    roomy = free_gib >= MIN_FREE_GIB
    yield Finding(
        "disk",
        "ok" if roomy else "note",
        f"{free_gib:.1f} GiB free here",
        "" if roomy else "Checkpoints need room: free some, or set run.dir to another disk.",
    )


def _packages() -> Iterator[Finding]:
    for requirement in _required():
        name, version = requirement.name, version_of(requirement.name)
        if version is None:
            yield Finding(name, "missing", "not installed", INSTALL)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(name, "missing", f"{version}, which is not {requirement.specifier}", INSTALL)
        else:
            yield Finding(name, "ok", version)
    for name, remedy in _OPTIONAL.items():
        version = version_of(name) or version_of(_ALSO_AS.get(name, name))
        yield Finding(name, "ok", version) if version else Finding(name, "note", "not installed", remedy)


def _required() -> list[Requirement]:
    """Requirements of the installed package, or of a checkout that is not installed."""
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        try:
            lines = tomllib.loads(_PYPROJECT.read_text("utf-8"))["project"]["dependencies"]
        except OSError:
            return [Requirement(_PACKAGE)]
    needed = map(Requirement, lines)
    here = (one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""}))
    return [one for one in here if one.name not in _DECODERS]


def _decoders() -> Iterator[Finding]:
    """PyAV is required; decord only for media.decoder=decord."""
    decoders: tuple[tuple[str, str, Status, str], ...] = (
        ("PyAV", "av", "missing", "It reads every video."),
        ("decord", "decord", "note", "It is only needed for media.decoder=decord."),
    )
    for name, package, status, remedy in decoders:
        problem = _import_problem(package)
        ok = Finding(name, "ok", f"{version_of(package)} reads video")
        yield ok if problem is None else Finding(name, status, problem, f"{remedy} {INSTALL}")


def _devices_and_kernels() -> Iterator[Finding]:
    problem = _import_problem("torch")
    if problem is not None:
        yield Finding("torch", "missing", f"does not import: {problem}", INSTALL)
        return
    import torch

    from vlm_pg.attention.kernels import available, preferred

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            memory = f"{properties.total_memory / GIB:.0f} GiB"
            yield Finding(f"GPU {index}", "ok", f"{properties.name}, {memory}, compute capability {capability}")
        device, dtype = torch.device("cuda"), torch.bfloat16
    else:
        remedy = "Fine for the embedded default. Larger models need a CUDA GPU"
        if torch.version.cuda is None:
            remedy += " and a torch built for CUDA (this one is not)"
        elif shutil.which("nvidia-smi"):
            remedy += "; nvidia-smi is there, so torch's CUDA version may not fit the driver"
        yield Finding("GPU", "note", "none that torch can use", remedy + ".")
        device, dtype = torch.device("cpu"), torch.float32
    reasons = available(device, dtype)
    chosen = preferred(reasons)
    for name, reason in reasons.items():
        detail = f"runs on {device.type} in {str(dtype).removeprefix('torch.')}" if reason is None else reason
        if name == chosen:
            detail += ", chosen by model.attention_kernel=auto"
        yield Finding(f"kernel {name}", "ok" if reason is None else "note", detail)
    if all(reason is not None for reason in reasons.values()):
        yield Finding("kernels", "missing", "no attention kernel runs here", INSTALL)


def _import_problem(module: str) -> str | None:
    """None if ``module`` imports; else why not (a missing package, or a shared library it cannot load)."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None
