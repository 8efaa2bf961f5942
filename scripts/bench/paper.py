"""FLOPs, bytes, kernels, waits of the host and peak memory of contestants on a GPU, counted without one.

    python -m scripts.bench.paper --models 7b --points 4096,8,512 --checkpointing --out paper.json

The contestants' own code runs on tensors without values, with the CUDA kernel of grouped attention. ``step``: one
forward and backward. ``rollout``: of ours the prefill and a decode step halfway, which stands for all. The least time
of a device is a roofline: of each kind of operation the larger of FLOPs by the peak and bytes by the bandwidth, summed.
Memory is above the weights, gradients included. No figure is measured.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.bench import run
from scripts.bench.counting import Counts, count, fake_mode, fake_policy, reference_operators
from scripts.bench.decode import count_decoding
from scripts.bench.models import NAMES, config_of, model_of
from scripts.bench.operations import MULTIPROCESSORS
from scripts.bench.others import CONTESTANTS as STEP_CONTESTANTS
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.rollout import CONTESTANTS as ROLLOUT_CONTESTANTS
from vlm_pg.bench.runner import describe_machine
from vlm_pg.bench.step_case import TrainingCase
from vlm_pg.bench.work import RolloutPoint, StepPoint, parse_points
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_json_atomic
from vlm_pg.memory import GIB
from vlm_pg.models.loading import DTYPES
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.devices import DEVICES, Device
from vlm_pg.plan.time import seconds_text
from vlm_pg.processes import resolve

FORMAT = 2
OURS = {"step": "grouped", "rollout": "ours"}
NO_LOOP = "its steps are not counted; measure it"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m scripts.bench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--models", nargs="+", metavar="MODEL", default=["7b"], help=f"of {', '.join(NAMES)}; or folders")
    add("--points", nargs="+", metavar="P,G,R", default=[], help="of step: prefix, responses, response tokens")
    add("--rollout-points", nargs="+", metavar="P,G,N", default=[], help="of rollout: prefix, responses, new tokens")
    names = [*STEP_CONTESTANTS, *ROLLOUT_CONTESTANTS]
    add("--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--dtype", choices=["fp32", "bf16"], default="bf16", help="of weights and activations")
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    add("--liger", action="store_true", help="with model.liger on, all contestants")
    add("--out", type=Path, help="file for all counts, JSON")
    return made


def main(argv: Sequence[str]) -> int:
    """Count, print and write.

    Raises:
        ConfigError: options that cannot be, a file that exists, no such model.
    """
    arguments = parser().parse_args(argv)
    if arguments.out and arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists. Give another file, or move this one away.")
    specs = specifications(arguments)
    settings = {key: getattr(arguments, key) for key in ("dtype", "checkpointing", "liger")}
    command = shlex.join(["python", "-m", "scripts.bench.paper", *argv])
    record: dict[str, Any] = {"format": FORMAT, "measurement": "paper", "commands": [command]}
    record |= {"machine": describe_machine(), "settings": settings, "entries": []}
    torch.set_num_threads(1)
    for spec in specs:
        entry = counted(spec | settings)
        record["entries"].append(entry)
        print(line_of(entry), flush=True)
        if arguments.out:
            write_json_atomic(arguments.out, record)
    return 0


def specifications(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Model, work, point and contestant of each count. Raises ConfigError for points that cannot be, or none."""
    form = "PREFIX,GENERATIONS,TOKENS in whole numbers, such as 4096,8,512"
    steps: list[Any] = parse_points(arguments.points, StepPoint, (3,), form)
    rollouts: list[Any] = parse_points(arguments.rollout_points, RolloutPoint, (3,), form)
    found = [
        {"model": model, "work": work, "point": point.record, "contestant": name}
        for model in arguments.models
        for work, points, known in (("step", steps, STEP_CONTESTANTS), ("rollout", rollouts, ROLLOUT_CONTESTANTS))
        for point in points
        for name in known
        if name in arguments.contestants
    ]
    if not found:
        raise ConfigError("There is nothing to count. Give --points or --rollout-points, and --contestants of them.")
    return found


def counted(spec: dict[str, Any]) -> dict[str, Any]:
    """The entry of one contestant at one point; or, as ``not_counted``, why it could not be."""
    entry = {key: spec[key] for key in ("model", "work", "point", "contestant")}
    contestant = (STEP_CONTESTANTS | ROLLOUT_CONTESTANTS)[spec["contestant"]]
    if reason := contestant.unavailable_because():
        return entry | {"not_counted": reason}
    if spec["work"] == "rollout" and spec["contestant"] != OURS["rollout"]:
        return entry | {"not_counted": NO_LOOP}
    try:
        return entry | _counted(spec, contestant.run)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # others' code on fake tensors raises anything; the next is counted
        words = str(error).strip().splitlines() or [""]
        return entry | {"not_counted": f"{type(error).__name__} on fake tensors: {words[0]}"}


def _counted(spec: dict[str, Any], name: str) -> dict[str, Any]:
    fakes, point = fake_mode(), spec["point"]
    policy = policy_of(spec, fakes)
    found = {"weights_bytes": sum(p.numel() * p.element_size() for p in policy.model.parameters())}
    with reference_operators(policy.model):
        if spec["work"] == "step":
            case = TrainingCase.random(policy, point["prefix"], point["lengths"])
            counts = count(partial(resolve(name), case), fakes)
            return found | {"peak_bytes": counts.peak_bytes} | _tree([(1, counts)], spec["dtype"])
        tokens = point["new_tokens"]
        half = count_decoding(policy, fakes, point["prefix"], point["generations"], max(2, tokens // 2), tokens)
    step = _tree([(1, half.step)], spec["dtype"])
    peak = max(half.prefill.peak_bytes, half.prefill.end_bytes + half.step.peak_bytes)
    whole = _tree([(1, half.prefill), (tokens - 1, half.step)], spec["dtype"])
    return found | {"peak_bytes": peak} | whole | {"decode_step": step}


def policy_of(spec: dict[str, Any], fakes: Any) -> Policy:
    """The fake policy of a specification, with a GPU's attention."""
    kernel, config = CudaFlashKernel(), config_of(spec["model"])
    kernel.multiprocessors = MULTIPROCESSORS
    checkpointing = spec["checkpointing"] and spec["work"] == "step"
    settings = ModelSettings(
        path=spec["model"], dtype=spec["dtype"], gradient_checkpointing=checkpointing, liger=spec["liger"]
    )

    build = partial(model_of, config, DTYPES[spec["dtype"]])
    return fake_policy(build, settings, fakes, kernel, spec["dtype"] == "bf16")


def _tree(terms: list[tuple[int, Counts]], dtype: str) -> dict[str, Any]:
    """Weighted sums, by kind, and the least seconds by device."""
    kinds = ("matmul", "attention", "other")
    flops = {kind: sum(times * one.flops[kind] for times, one in terms) for kind in kinds}
    moved = {kind: sum(times * one.bytes_of(kind) for times, one in terms) for kind in kinds}
    waits = {where: sum(times * one.waits[where] for times, one in terms) for _, c in terms for where in c.waits}
    launches = sum(times * one.launches.total() for times, one in terms)
    counts = {"flops": flops, "bytes": moved, "waits": waits, "launches": launches}
    return {"counts": counts, "least": {name: least(counts, device, dtype) for name, device in DEVICES.items()}}


def least(counts: dict[str, Any], device: Device, dtype: str) -> dict[str, Any]:
    """Roofline of one device: ``seconds``, and the ``roof`` under which it spends more of them."""
    under = {"FLOPs": 0.0, "bytes": 0.0}
    for kind, moved in counts["bytes"].items():
        computing = counts["flops"][kind] / device.flops_per_second[{"bf16": 2, "fp32": 4}[dtype]]
        moving = moved / device.bytes_per_second
        under["FLOPs" if computing > moving else "bytes"] += max(computing, moving)
    return {"seconds": sum(under.values()), "roof": max(under, key=lambda roof: under[roof])}


def line_of(entry: dict[str, Any]) -> str:
    """An entry in a line."""
    point = ",".join(str(value) for key, value in entry["point"].items() if key not in ("ratio", "lengths"))
    words = f"{entry['model']}, {entry['work']} {point}, {entry['contestant']}: "
    if "not_counted" in entry:
        return f"{words}not counted: {entry['not_counted']}"
    counts = entry["counts"]
    times = ", ".join(f"{name} {seconds_text(one['seconds'])} ({one['roof']})" for name, one in entry["least"].items())
    return (
        f"{words}{sum(counts['flops'].values()) / 1e12:,.3f} TFLOP, {sum(counts['bytes'].values()) / 1e9:,.1f} GB, "
        f"{counts['launches']:,} kernels, {sum(counts['waits'].values())} waits, peak {entry['peak_bytes'] / GIB:.2f} "
        f"GiB; roofline {times}"
    )


if __name__ == "__main__":
    run(main)
