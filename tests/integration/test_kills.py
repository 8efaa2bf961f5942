"""A run of one process is killed at random moments and resumed: the same weights, bit for bit, whenever it was.

The long table prints where the kills hit: ``pytest -m matrix -s tests/integration/test_kills.py``.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.processes import ModuleProcess
from tests.support.runs import read_lines
from tests.support.small_run import STEPS, small_run

pytestmark = pytest.mark.matrix

KILLS = 300
# How often a resumed run is killed again.
AGAIN = 2 / 3


@dataclass(frozen=True)
class Moment:
    """So many seconds after a run has told so many times where it is: also on a busier machine the same phase."""

    told: int
    seconds: float


class Killed:
    """One run, by the folder it works in, with what is random about it."""

    def __init__(self, folder: Path, name: str):
        self.run, self._told = folder / name, folder / f"{name}.told"
        self._arguments = [str(self._told), str(folder / "run.yaml"), f"run.dir={self.run}", "run.resume=auto"]

    def start(self) -> ModuleProcess:
        self._told.unlink(missing_ok=True)
        return ModuleProcess("tests.integration.traced_run", *self._arguments)

    def told(self) -> list[tuple[float, str]]:
        """When it came where, since it was started."""
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        return [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]

    def kill_at(self, moment: Moment) -> str | None:
        """Start, and kill then; the phase that was hit, None if it was done before."""
        process = self.start()
        while process.returncode is None and len(self.told()) < moment.told:
            time.sleep(0.002)
        time.sleep(moment.seconds)
        process.signal(signal.SIGKILL)
        done = process.finish()
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == 0, done.stdout + done.stderr
            return None
        return self.told()[-1][1] if self.told() else "before setup"

    def finish(self) -> None:
        done = self.start().finish()
        assert done.returncode == 0, done.stdout + done.stderr

    def is_as(self, whole: Path) -> bool:
        folders = [run / f"checkpoints/step-{STEPS:06d}" for run in (self.run, whole)]
        files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in folders]
        assert files[0] == files[1] and len(files[0]) == 2, files  # weights, optimizer states
        for file in files[0]:
            ours, theirs = (load_file(folder / file) for folder in folders)
            assert ours.keys() == theirs.keys()
            if not all((ours[name] == tensor).all() for name, tensor in theirs.items()):
                return False
        return [line["step"] for line in read_lines(self.run / "metrics.jsonl")] == list(range(1, STEPS + 1))


def moments(whole: Killed, chance: random.Random) -> Iterator[Moment]:
    """Drawn evenly over the duration of a whole run, which is made here."""
    begun = time.time()
    whole.finish()
    times = [begun, *(when for when, _ in whole.told())]
    while True:
        when = chance.uniform(begun, times[-1])
        told = sum(one <= when for one in times) - 1
        yield Moment(told, when - times[told])


def test_killed_at_any_moment_and_resumed(tmp_path: Path) -> None:
    small_run(tmp_path)
    chance = random.Random(KILLS)
    # The first start brings up what all are forked from.
    Killed(tmp_path, "first").finish()
    whole = Killed(tmp_path, "whole")
    drawn = moments(whole, chance)
    hits: Counter[str] = Counter()
    runs = 0
    while hits.total() < KILLS:
        runs += 1
        killed = Killed(tmp_path, f"killed-{runs}")
        while (phase := killed.kill_at(next(drawn))) is not None:
            hits[phase] += 1
            if hits.total() == KILLS or chance.random() > AGAIN:
                break
        killed.finish()
        assert killed.is_as(whole.run), (runs, hits)
        shutil.rmtree(killed.run)
        if runs % 10 == 0:
            print(f"{hits.total()} kills of {runs} runs", flush=True)
    shares = ", ".join(f"{name} {100 * count / KILLS:.1f} %" for name, count in hits.most_common())
    print(f"{KILLS} kills of {runs} runs, all ended bit for bit; hit: {shares}")
