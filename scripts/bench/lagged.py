"""Accuracy on the embedded task when rollouts come from the weights of k updates ago, with corrections and without.

    vlm-pg prepare embedded --out data/embedded
    python -m scripts.bench.lagged --out docs/benchmarks/FILE.json                    all cases, seeds 0, 1, 2
    python -m scripts.bench.lagged --out FILE.json --cases synchronous lag5_tis --seeds 0 --set training.steps=50

The sampler is the trainer's own engine on a second copy of the policy, which always has the weights of k updates ago
(the first k steps have the initial ones): what a server with ``rollout.staleness=k`` may do at worst, at every step.
Each run is a process with one thread; ``--jobs`` of them run at a time. Runs that FILE.json already holds are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from scripts.bench import run
from vlm_pg.config import load_config
from vlm_pg.files import write_json_atomic
from vlm_pg.models.loading import load_policy
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.tally import Tally
from vlm_pg.training.engines import Engine
from vlm_pg.training.main import train
from vlm_pg.training.setup import make_sampler
from vlm_pg.types import BadSample, Prompt, Rollout

RECOMPUTE = ["rollout.logprobs=recompute"]
TIS = [*RECOMPUTE, "algorithm.importance_cap=2"]
MIS = [
    *RECOMPUTE,
    "algorithm.importance_cap=3",
    "algorithm.importance_level=sequence",
    "algorithm.importance_mode=mask",
]
# Case -> (lag, whether rollouts say which weights sampled them, settings). ``uncorrected`` takes the ratio as 1.
CASES: dict[str, tuple[int, bool, list[str]]] = {
    "synchronous": (0, True, []),
    "lag5_uncorrected": (5, False, RECOMPUTE),
    "lag5_tis": (5, True, TIS),
    "lag5_mis": (5, True, MIS),
    "lag5_ppo_ratio": (5, True, []),
    **{f"lag{lag}_tis": (lag, True, TIS) for lag in (1, 2, 4)},
}


class LaggedSampler(Sampler):
    """The policy's own engine with the weights of ``lag`` updates ago."""

    scores_itself = True

    def __init__(self, engine: RolloutEngine, lag: int, says_version: bool):
        self._trained, self._says_version = engine.policy, says_version
        self._policy = load_policy(engine.policy.settings.path, settings=engine.policy.settings)
        self._engine = RolloutEngine(self._policy, engine.settings, engine.seed)
        self._past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        self._version = 0

    def sync_weights(self, step: int) -> None:
        state = {name: value.detach().clone() for name, value in self._trained.model.state_dict().items()}
        self._past.append((self._trained.weights_version, state))
        self._version, oldest = self._past[0]
        self._policy.model.load_state_dict(oldest)
        self._policy.weights_changed()

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        # Features of the trained tower are not those of older weights.
        own = [replace(prompt, features=None) for prompt in prompts]
        version = self._version if self._says_version else None
        groups = self._engine.generate(own, step)
        return [tuple(replace(rollout, weights_version=version) for rollout in group) for group in groups]

    def take_faults(self) -> list[BadSample] | None:
        return None

    def report(self, tally: Tally) -> None:
        self._engine.report(tally)


def train_case(case: str, seed: int, settings: Sequence[str], folder: str) -> dict[str, Any]:
    """Figures of one run, in a process of its own."""
    lag, says_version, of_case = CASES[case]

    def make(config: Any, engine: Engine, *others: Any) -> Sampler:
        sampler = make_sampler(config, engine, *others)
        assert isinstance(sampler, RolloutEngine)
        return LaggedSampler(sampler, lag, says_version) if lag else sampler

    overrides = [
        f"run.dir={folder}/{case}-{seed}", f"run.seed={seed}", "eval.controls=[]", "eval.control_sets=null",
        "eval.before=false", "observe.print_rollouts_every=0", "observe.report=false", "rollout.keep_forward_gb=0",
        *of_case, *settings,
    ]  # fmt: skip
    with patch("vlm_pg.training.setup.make_sampler", make):
        code = train(load_config("configs/embedded.yaml", overrides))
    if code:
        raise RuntimeError(f"{case}, seed {seed}: exit code {code}")
    path = Path(folder) / f"{case}-{seed}"
    sets = json.loads((path / "summary.json").read_text())["eval_after"]["sets"]
    found = {name: {key: values[key] for key in ("accuracy", "standard_error", "n")} for name, values in sets.items()}
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    right = [line["reward/accuracy"] for line in lines]
    curve = [round(statistics.fmean(right[start : start + 50]), 4) for start in range(0, len(right), 50)]
    return {"case": case, "seed": seed, "eval": found, "accuracy_of_50_steps": curve}


def summary(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per case: mean accuracies and their standard errors over seeds."""
    lines = []
    for case in CASES:
        of_case = [one for one in runs if one["case"] == case]
        cells = []
        for name in ("seen_orders", "unseen_orders"):
            values = [one["eval"][name]["accuracy"] for one in of_case]
            if values:
                error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
                cells.append(
                    f"{name} {statistics.fmean(values):.3f} +- {error:.3f} ({', '.join(f'{v:.3f}' for v in values)})"
                )
        if cells:
            lines.append(f"{case:17} {'; '.join(cells)}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args(arguments)
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    done = {(one["case"], one["seed"]) for one in runs}
    wanted = [(case, seed) for case in options.cases for seed in options.seeds if (case, seed) not in done]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        futures = [pool.submit(train_case, case, seed, options.set, folder) for case, seed in wanted]
        for future in as_completed(futures):
            runs.append(future.result())
            write_json_atomic(options.out, {"settings": options.set, "runs": runs})
    print("\n".join(summary(runs)))
    return 0


if __name__ == "__main__":
    run(main)
