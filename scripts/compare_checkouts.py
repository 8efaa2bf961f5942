"""Short training runs with this checkout and with another one: does anything that users see differ?

    python scripts/compare_checkouts.py ../other-checkout            all cases, a few minutes
    python scripts/compare_checkouts.py ../other-checkout --cases zero2 lora
    python scripts/compare_checkouts.py ../other-checkout --close 1e-6
    python scripts/compare_checkouts.py ../other-checkout --here rollout.keep_forward_gb=0

Both use the Python that runs this file. Compared are weights and optimizer states of the last checkpoint, rollouts,
metrics of every step but those of time and memory, and evaluations; equal means bit for bit, with ``--close`` within
that share of a tensor's or figure's size. "resume" begins with the other checkout and goes on with this one.
Exits with 1 where something differs or a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent.parent
# Of metrics and results: what differs from run to run.
TIMED = ("second", "time", "_gib", "core_wait", "memory", "path", "folder", "versions", "command")
TWO = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
DEEPSPEED = ["training.engine=deepspeed"]
# Case -> (processes, configuration, settings).
CASES: dict[str, tuple[int, str, list[str]]] = {
    "embedded": (1, "embedded", []),
    **{f"preset {path.stem}": (1, f"algorithms/{path.stem}", []) for path in (HERE / "configs/algorithms").glob("*")},
    "zero2": (2, "embedded", [*DEEPSPEED, "training.deepspeed_config=configs/deepspeed/zero2.json"]),
    "zero3": (2, "embedded", [*DEEPSPEED, "training.deepspeed_config=configs/deepspeed/zero3.json"]),
    "sequence ranks": (2, "embedded", ["training.sequence_parallel=2"]),
    "lora": (1, "embedded", ["model.lora.rank=4", "model.train=[language]"]),
    "frozen tower": (1, "embedded", ["model.train=[language]"]),
    "bf16": (1, "embedded", ["model.dtype=bf16"]),
    "updates": (
        1,
        "embedded",
        ["algorithm.minibatches=2", "training.micro_batch_tokens=600", "prompt.max_prompt_tokens=500"],
    ),
}


def command(case: str, steps: int, data: Path, run: Path) -> list[str]:
    processes, config, settings = CASES[case]
    return [
        sys.executable, "-m", *(TWO if processes == 2 else ()), "vlm_pg.cli", "train", f"configs/{config}.yaml",
        f"run.dir={run}", f"run.name={run.name}", f"data.train={data}/train.jsonl", f"training.steps={steps}",
        f"data.eval.seen_orders={data}/eval_seen.jsonl", f"data.eval.unseen_orders={data}/eval_unseen.jsonl",
        "eval.limit=4", "training.prompts_per_step=4", "rollout.num_generations=4", "observe.trackers=[]",
        "training.checkpoint_every=2", *settings,
    ]  # fmt: skip


def run(checkout: Path, words: list[str]) -> str | None:
    """None, or the end of what the failed command printed."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-1500:] if done.returncode else None


def trained(case: str, checkouts: list[Path], data: Path, folder: Path, here: list[str]) -> str | None:
    """Trains 3 steps with one checkout, or 2 with the first and up to 4 with the second; ``here``: settings of this."""
    for checkout, steps in zip(checkouts, (2, 4) if len(checkouts) == 2 else (3,), strict=True):
        settings = here if checkout == HERE else []
        if failed := run(checkout, command(case, steps, data, folder) + settings):
            return f"{checkout} failed:\n{failed}"
    return None


def differences(one: Path, other: Path, close: float) -> Iterator[str]:
    """Of two run folders."""
    for folder in (one, other):
        if not (folder / "checkpoints").is_dir():
            yield f"{folder} has no checkpoints"
            return
    newest = [max((folder / "checkpoints").glob("step-*")) for folder in (one, other)]
    for names, read in (("*.safetensors", tensors), ("optimizer/*", tensors)):
        yield from _compared([read(folder, names) for folder in newest], close)
    lines = [f"{name}.jsonl" for name in ("metrics", "rollouts")]
    lines += sorted({path.name for folder in (one, other) for path in folder.glob("eval_*.jsonl")})
    for name in lines:
        yield from _compared([dict(_numbered(folder / name)) for folder in (one, other)], close)


def tensors(folder: Path, names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob(names)):
        if path.suffix == ".safetensors":
            found |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
        elif path.suffix == ".json":
            found |= dict(_flat(path.name, json.loads(path.read_text())))
    return found


def _numbered(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_file():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield from _flat(f"{path.name}:{number}", json.loads(line))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and words by where they stand; lists and objects without any, too."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not parts:
        yield name, value
    for key, part in parts:
        if not any(word in str(key) for word in TIMED):
            yield from _flat(f"{name} {key}", part)


def _compared(both: list[dict[str, Any]], close: float) -> Iterator[str]:
    one, other = both
    for name in sorted(one.keys() ^ other.keys()):
        yield f"{name} is in {'this' if name in one else 'the other'} alone"
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                yield f"{name}: {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}"
            elif not torch.equal(a, b):
                apart = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))
                if not apart <= close:
                    yield f"{name}: {apart:.1e} of its norm"
        elif a != b:
            numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
            if not numbers or not abs(a - b) <= close * max(abs(a), abs(b)):
                yield f"{name}: {a!r}, {b!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="checkout to compare with")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "resume"], default=[*CASES, "resume"])
    parser.add_argument("--close", type=float, default=0.0, help="relative difference that is still equal")
    parser.add_argument("--here", nargs="+", default=[], metavar="KEY=VALUE", help="settings of this checkout alone")
    parser.add_argument("--most", type=int, default=5, help="differences shown of each case")
    options = parser.parse_args()
    other, differ = options.other.resolve(), 0
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        words = [sys.executable, "-m", "vlm_pg.cli", "prepare", "embedded", "--out", str(data)]
        if failed := run(other, [*words, "--train", "48", "--eval", "8"]):
            sys.exit(f"{other} could not prepare the data:\n{failed}")
        for case in options.cases:
            print(f"{case} ...", end=" ", flush=True)
            folders = [Path(place) / f"{case.replace(' ', '_')}_{side}" for side in ("this", "other")]
            what, sides = case, ([HERE], [other])
            if case == "resume":
                what, sides = "embedded", ([other, HERE], [other, other])
            failures = [trained(what, *each, options.here) for each in zip(sides, [data] * 2, folders, strict=True)]
            found = [failure for failure in failures if failure] or list(differences(*folders, options.close))
            differ += bool(found)
            print(f"{len(found)} differences" if found else "equal", flush=True)
            for line in found[: options.most]:
                print(f"    {line}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
