"""A run of a few seconds with three checkpoints, in this process: what folders are damaged and resumed with."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs import save_tiny_model, write_config
from vlm_pg.cli import main

STEPS = 3
# The reward of a random model's answers is 0 for all of them: these differ by text.
SPREAD = "def spread(response, question):\n    return sum(map(ord, response)) % 7 / 7\n"


@dataclass(frozen=True)
class Ended:
    """How a command ended, and all that it printed."""

    code: int
    printed: str


def short_run(folder: Path, **sections: Any) -> Path:
    """The configuration of the run; everything it needs lies in ``folder``, its own folder is ``folder / "run"``."""
    (folder / "spread.py").write_text(SPREAD)
    records = [
        {
            "problem_id": number,
            "problem": f"How much is {number} + {number}?",
            "data_type": "text",
            "problem_type": "numerical",
            "solution": f"<answer>{2 * number}</answer>",
            "options": [],
            "path": "",
        }
        for number in range(6)
    ]
    (folder / "records.json").write_text(json.dumps(records))
    whole = {
        "run": {"resume": "auto", "dir": str(folder / "run")},
        "model": {"path": str(save_tiny_model(folder / "model"))},
        "data": {"train": str(folder / "records.json")},
        "media": {"workers": 0},
        "rollout": {"num_generations": 2, "max_new_tokens": 4},
        "reward": {"functions": [{"function": f"{folder}/spread.py:spread"}]},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "learning_rate": 1e-3,
            "checkpoint_every": 1,
            "keep_checkpoints": 9,
        },
        "observe": {"trackers": [], "report": False, "rollouts_per_step": 1, "thumbnails": 0},
    }
    for name, values in sections.items():
        whole[name] = whole.get(name, {}) | values
    return write_config(folder / "run.yaml", whole)


def train_here(config: Path, *overrides: str) -> Ended:
    """``vlm-pg train`` in this process; whatever is no message for people is raised."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main(["train", str(config), *overrides])
    return Ended(code, printed.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
