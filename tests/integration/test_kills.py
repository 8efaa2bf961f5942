"""A run of one process is killed at random moments and resumed: the same weights, bit for bit, whenever it was.

The long table prints where the kills hit: ``pytest -m matrix -s tests/integration/test_kills.py``.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.processes import ModuleProcess
from tests.support.runs import read_lines
from tests.support.small_run import STEPS, small_run

KILLS = 300
# How often a resumed run is killed again.
AGAIN = 0.5
STATES = ("model.safetensors", "optimizer.safetensors")


class Killed:
    """One run, by the folder it works in, with what is random about it."""

    def __init__(self, folder: Path, name: str, chance: random.Random):
        self.run, self._told, self._chance = folder / name, folder / f"{name}.phase", chance
        self._arguments = [str(self._told), str(folder / "run.yaml"), f"run.dir={self.run}", "run.resume=auto"]

    def start(self) -> ModuleProcess:
        return ModuleProcess("tests.integration.told_run", *self._arguments)

    def kill_within(self, seconds: float) -> str | None:
        """Start, and kill at a random moment of so many seconds; the phase that was hit, None if it was done before."""
        moment_seconds = time.monotonic() + self._chance.uniform(0, seconds)
        process = self.start()
        while process.returncode is None and time.monotonic() < moment_seconds:
            time.sleep(0.002)
        process.signal(signal.SIGKILL)
        done = process.finish()
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == 0, done.stdout + done.stderr
            return None
        return self._told.read_text().strip() if self._told.exists() else "before setup"

    def finish(self) -> None:
        done = self.start().finish()
        assert done.returncode == 0, done.stdout + done.stderr

    def is_as(self, whole: Path) -> bool:
        for file in STATES:
            ours, theirs = (load_file(run / f"checkpoints/step-{STEPS:06d}" / file) for run in (self.run, whole))
            assert ours.keys() == theirs.keys()
            if not all((ours[name] == tensor).all() for name, tensor in theirs.items()):
                return False
        return [line["step"] for line in read_lines(self.run / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kills", [pytest.param(KILLS, marks=pytest.mark.matrix), 5])
def test_killed_at_any_moment_and_resumed(kills: int, tmp_path: Path) -> None:
    small_run(tmp_path)
    chance = random.Random(kills)
    whole = Killed(tmp_path, f"whole-{kills}", chance)
    whole.finish()  # the first start brings up what all are forked from
    shutil.rmtree(whole.run)
    start_seconds = time.monotonic()
    whole.finish()
    seconds = time.monotonic() - start_seconds
    hits: Counter[str] = Counter()
    runs = 0
    while hits.total() < kills:
        runs += 1
        killed = Killed(tmp_path, f"killed-{runs}", chance)
        while (phase := killed.kill_within(seconds)) is not None:
            hits[phase] += 1
            if hits.total() == kills or chance.random() > AGAIN:
                break
        killed.finish()
        assert killed.is_as(whole.run), (runs, hits)
        shutil.rmtree(killed.run)
        if runs % 10 == 0:
            print(f"{hits.total()} kills of {runs} runs", flush=True)
    shares = ", ".join(f"{name} {100 * count / kills:.1f} %" for name, count in hits.most_common())
    print(f"{kills} kills of {runs} runs of {seconds:.1f} s, all ended bit for bit; hit: {shares}")
