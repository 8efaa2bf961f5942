"""Whatever a file of records holds, and whatever stands under its name, is read or refused in words.

A watched process reads odd and damaged files; it survives all of them. Of every file: it ends, the refusal names the
file, no other file is opened, nothing is started or connected to; what is accepted is what the file says, and can be
written, tokenized and graded; of all together: no descriptor, process or temporary file is left. A tenth runs in the
usual tests, all of it under the marker ``matrix``.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.record_columns import columns
from tests.support.record_files import cut_footers, damaged, healthy, nested_values, odd_entries, structured
from tests.support.watch import OpenedFiles, memory_bytes

pytestmark = pytest.mark.matrix

ROOT = Path(__file__).parents[2]
CPU_SECONDS = 30.0
# nobody waits longer for one file, however busy the machine is: it hangs
HANGS_SECONDS = 300.0


class Watched:
    """The process that reads. ``read`` asserts what holds of every file, ``close`` what holds of all."""

    def __init__(self, folder: Path):
        self.root, self.logs, self.temporary = folder / "root", folder / "logs", folder / "temporary"
        for path in (self.root, self.logs, self.temporary):
            path.mkdir()
        self.opened = OpenedFiles(self.root)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.record_reader", str(self.logs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        self.descriptors = self._answer("start")["descriptors"]
        self.reasons: Counter[str] = Counter()
        self.files, self.slowest, self.largest = 0, 0.0, 0

    def _answer(self, name: str) -> dict:  # type: ignore[type-arg]
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANGS_SECONDS)
        assert ready, f"{name!r}: reading it hangs"
        line = self.process.stdout.readline()
        assert line, f"{name!r}: reading it ended the process, exit code {self.process.wait()}"
        return json.loads(line)

    def read(self, path: Path) -> None:
        self.opened.names()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(str(path)).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._answer(path.name)
        self.files += 1
        self.slowest = max(self.slowest, answer["seconds"])
        self.reasons.update(answer["reasons"])
        self.reasons["accepted"] += answer["accepted"]
        assert answer["seconds"] <= CPU_SECONDS, path.name
        assert not answer["noted"], (path.name, answer["noted"])
        assert self.opened.names() <= {path.name, "plain.jsonl" if path.name == "linked.jsonl" else path.name}
        assert answer["descriptors"] <= self.descriptors, f"{path.name} was left open"
        if "refused" in answer:
            message = answer["refused"]
            self.reasons["file refused"] += 1
            assert path.name[:20].encode("unicode_escape").decode()[:20] in message and message.isprintable(), message
            assert len(message) <= 1_500 and message.count(". ") >= 1

    def read_content(self, files: Iterable[tuple[str, bytes]]) -> None:
        for name, data in files:
            path = self.root / name
            path.write_bytes(data)
            self.read(path)
            path.unlink()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.largest = memory_bytes(self.process.pid, "VmHWM")
        self.process.stdin.close()
        assert self.process.wait() == 0
        self.process.stdout.close()
        assert list(self.temporary.iterdir()) == []
        self.opened.close()
        print(f"\n{self.files} files, {dict(self.reasons)}, slowest {self.slowest:.2f} s of a core, "
              f"largest {self.largest / 2**30:.2f} GiB")  # fmt: skip


def test_healthy_files_and_odd_entries(tmp_path: Path):
    watched = Watched(tmp_path)
    watched.read_content(healthy().items())
    assert watched.reasons == {"accepted": 12 * len(healthy())}
    watched.read_content([("nested.jsonl", nested_values()), *cut_footers()[::7]])
    for path in odd_entries(watched.root):
        watched.read(path)
    watched.close()
    assert watched.reasons["file refused"] > 20


def test_a_tenth_of_the_odd_files(tmp_path: Path):
    watched = Watched(tmp_path)
    watched.read_content(structured(seed) for seed in range(150))
    watched.read_content(damaged(seed) for seed in range(120))
    watched.read_content(columns(seed) for seed in range(30))
    watched.close()
    assert watched.reasons["accepted"] > 100 and watched.reasons["file refused"] > 50


def test_all_odd_files(tmp_path: Path):
    watched = Watched(tmp_path)
    watched.read_content(cut_footers())
    watched.read_content(structured(seed) for seed in range(150, 2000))
    watched.read_content(damaged(seed) for seed in range(120, 1700))
    watched.read_content(columns(seed) for seed in range(30, 500))
    watched.close()
    assert watched.files >= 2_000
