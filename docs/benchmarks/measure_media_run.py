"""Processor time that media take in a real training run: decoded every time, first kept, then taken from the cache.

    python docs/benchmarks/measure_media_run.py --records FILE.json --media-root FOLDER --out FILE.json [--epochs 6]

``vlm-pg train`` with the tiny model, three times, each in a process of its own, in which media are decoded
(media.workers=0) and ``load_file``, the door between training and media, is timed by the interpreter's profiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_RUN = """
import cProfile, json, pstats, sys, time
import torch
from vlm_pg.cli import main
torch.set_num_threads(1)
profile = cProfile.Profile(time.process_time)
profile.enable()
code = main(["train", *sys.argv[2:]])
profile.disable()
found = {name: {"calls": calls, "cpu_seconds": total}
         for (file, _, name), (_, calls, _, total, _) in pstats.Stats(profile).stats.items()
         if (name, "vlm_pg" in file) in (("load_file", True), ("build", True))}
open(sys.argv[1], "w").write(json.dumps(found))
sys.exit(code)
"""
_RUNS = {"decoded": False, "first": True, "kept": True}
REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--media-root", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    questions = len(json.loads(arguments.records.read_text()))
    settings = {
        "model": {"path": str(REPOSITORY / "assets/tiny-qwen2_5-vl"), "train": ["language"]},
        "data": {"train": str(arguments.records.resolve()), "media_root": str(arguments.media_root.resolve()),
                 "prompt_cache_mb": 0},
        "media": {"workers": 0},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "training": {"steps": arguments.epochs, "prompts_per_step": questions, "learning_rate": 1e-3},
        "eval": {"controls": [], "control_sets": [], "headline_set": None},
        "observe": {"trackers": [], "report": False, "thumbnails": 0},
    }  # fmt: skip
    command = ["python", "docs/benchmarks/measure_media_run.py", *sys.argv[1:]]
    runs: dict[str, object] = {}
    found = {"command": command, "questions": questions, "epochs": arguments.epochs, "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.yaml")
        config.write_text(json.dumps(settings))
        for name, keeps in _RUNS.items():
            result = Path(folder, f"{name}.json")
            options = [f"run.dir={folder}/{name}", *([f"cache.folder={folder}/cache"] if keeps else [])]
            command = [sys.executable, "-c", _RUN, str(result), str(config), *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
            lines = Path(folder, name, "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line)["seconds/prompts"] for line in lines]
            runs[name] = {**json.loads(result.read_text()), "seconds/prompts": steps}
            print(name, runs[name])
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
