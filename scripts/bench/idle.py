"""Idle shares of trainer and server by ``rollout.staleness`` and ``rollout.in_flight``, on a CPU.

    vlm-pg prepare embedded --out data/embedded
    VLM_PG_VLLM=FOLDER/bin/vllm python -m scripts.bench.idle --out FILE.json
    python -m scripts.bench.idle --engine vlm_pg --out FILE.json

Short runs of the embedded task with a random model, trainer and server on one core each. The first steps are left out:
nothing is sampled ahead yet; and the last ones, behind which there is nothing to sample.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.bench import run
from scripts.bench.vllm_rollouts import save_model
from scripts.bench.vllm_server import COMMAND_VARIABLE, VllmServer
from vlm_pg.bench.runner import describe_machine
from vlm_pg.files import write_json_atomic

CASES = {"0": (0, "finish"), **{f"{k} {how}": (k, how) for k in (1, 2, 4) for how in ("finish", "continue", "redo")}}
FLAGS = ["--max-model-len", "2048", "--max-num-batched-tokens", "16384", "--max-num-seqs", "64", "--enable-scale-out"]
FLAGS += ["--mm-processor-cache-gb", "0", "--enforce-eager"]
SHOWN = ("idle/trainer", "idle/server", "rollout_lag", "rollouts_continued", "step_seconds")
LEFT_OUT = 4
CONFIG = "configs/embedded.yaml"
CLI = (sys.executable, "-m", "vlm_pg.cli")
PINNED_TO_0, PINNED_TO_1 = ("taskset", "--cpu-list", "0"), ("taskset", "--cpu-list", "1")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "vlm_pg"), default="vllm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="default: all that the engine can do")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args(argv)
    own = options.engine == "vlm_pg"
    cases = options.cases or [name for name, (_, in_flight) in CASES.items() if not own or in_flight == "finish"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", "small")
        with _url(Path(folder), own) as url:
            for case in cases:
                staleness, in_flight = CASES[case]
                home = Path(folder) / case.replace(" ", "-")
                settings = [
                    f"run.dir={home}", f"model.path={folder}/model", f"training.steps={options.steps}",
                    "rollout.engine=server", f"rollout.server.url={url}", "rollout.logprobs=recompute",
                    f"rollout.staleness={staleness}", f"rollout.in_flight={in_flight}", "eval.controls=[]",
                    "eval.control_sets=null", "eval.before=false", "eval.after=false", "observe.report=false",
                    "algorithm.importance_cap=2", "algorithm.kl_coef=0", "media.workers=0", *options.set,
                ]  # fmt: skip
                trains = [*PINNED_TO_0, *CLI, "train", CONFIG, *settings]
                launch = "rollout.server.launch={engine: vlm_pg}"
                serves = [*PINNED_TO_1, *CLI, "serve", CONFIG, *settings, launch, "--"]
                subprocess.run([*(serves if own else ()), *trains], check=True)
                lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
                kept = lines[LEFT_OUT:-LEFT_OUT]
                of_case = {name: [line[name] for line in kept if name in line] for name in SHOWN}
                found[case] = {name: statistics.fmean(values) for name, values in of_case.items() if values}
                print(case, found[case], flush=True)
    write_json_atomic(options.out, {"machine": describe_machine(), "command": list(argv), "cases": found})
    return 0


@contextmanager
def _url(folder: Path, own: bool) -> Iterator[str]:
    """Of a vLLM that runs inside, or of a free port, where ``vlm-pg serve`` starts servers for each run."""
    pinned = [*PINNED_TO_1, *([] if own else [os.environ[COMMAND_VARIABLE]])]
    server = VllmServer(pinned, folder / "model", folder, FLAGS)
    if own:
        yield server.url
        return
    try:
        server.start()
        yield server.url
    finally:
        server.kill()


if __name__ == "__main__":
    run(main)
