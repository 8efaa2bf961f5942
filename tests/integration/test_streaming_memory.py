"""Training on a million prepared records takes no more memory than on a tenth of them.

``pytest -m matrix -s tests/integration/test_streaming_memory.py`` prints the peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_sets import write_shards
from tests.support.processes import ModuleProcess
from tests.support.small_run import small_run
from vlm_pg.types import Sample

pytestmark = pytest.mark.matrix


def questions(count: int) -> Iterator[Sample]:
    for number in range(count):
        question = f"How much is {number} and {number % 97}? " + "Say it in digits. " * (number % 7)
        yield Sample(str(number), question, (), (), str(number + number % 97), "numerical", f"set {number % 3}", "sums")


def peak_mib(folder: Path, records: int, *options: str) -> float:
    path = folder / f"{records}"
    path.mkdir()
    write_shards(path, "train", questions(records))
    command = ["train", str(folder / "run.yaml"), f"data.train={path}:train", *options, f"run.dir={path / 'run'}"]
    done = ModuleProcess("tests.support.peak", *command).finish(24 * 3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.rsplit("peak KiB", 1)[1]) / 1024


@pytest.mark.parametrize(
    ("records", "options"),
    [
        (1_000_000, ()),
        (1_000_000, ("data.mixture={set 0: 1, set 1: 2, set 2: 3}",)),
        (50_000, ("data.mixture={set 0: 1, set 1: 2, set 2: 3}",)),
    ],
)
def test_memory_does_not_grow_with_the_records(tmp_path: Path, records: int, options: tuple[str, ...]) -> None:
    small_run(tmp_path)
    options = (*options, "data.eval={}", "prompt.max_prompt_tokens=300", "training.micro_batch_tokens=400")
    tenth, whole = (peak_mib(tmp_path, count, *options) for count in (records // 10, records))
    print(f"{records:,} records: {whole:.0f} MiB, a tenth of them {tenth:.0f} MiB")
    assert whole < 1.1 * tenth
