"""``vlm-pg train`` that kills itself: python -m tests.integration.dying_run WHEN STEP CONFIG [key=value ...].

WHEN is a moment inside the save of STEP's checkpoint ("begun", "weights", "before_manifest", "before_rename"), or
"training": in the middle of STEP, between its batch and the update. The kill is SIGKILL to the own process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_pg.config import load_config
from vlm_pg.training import checkpoints, saving, trainer
from vlm_pg.training.main import train


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_around(module: Any, name: str, matches: Callable[..., bool], before: bool) -> None:
    """Replace ``module.name`` by a function that dies before or after its work when ``matches(*arguments)``."""
    original = getattr(module, name)

    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if before and matches(*arguments):
            die()
        result = original(*arguments, **keywords)
        if matches(*arguments):
            die()
        return result

    setattr(module, name, replacement)


def main(when: str, step: int, config: str, *overrides: str) -> int:
    name = f"step-{step:06d}"
    if when == "begun":
        die_around(checkpoints, "begin", lambda folder, number: number == step, before=False)
    elif when == "weights":
        die_around(checkpoints, "commit", lambda folder, number, state: number == step, before=True)
    elif when == "before_manifest":
        die_around(
            checkpoints, "_sha256", lambda path: name in str(path) and path.suffix == ".safetensors", before=False
        )
    elif when == "before_rename":
        die_around(os, "rename", lambda source, target: Path(target).name == name, before=True)
    elif when == "training":
        die_around(
            trainer, "run_updates", lambda engine, *others: engine.policy.weights_version == step - 1, before=True
        )
    else:
        raise ValueError(when)
    assert saving.checkpoints is checkpoints
    return train(load_config(config, overrides))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
