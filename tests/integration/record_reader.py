"""Reads record files, one path a line on standard input, and answers with what became of each: a watched process.

Run as ``python -m tests.integration.record_reader FOLDER``. What is asserted here ends the process with its traceback.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import record_oracle
from tests.support.record_files import good, healthy
from tests.support.watch import descriptors, settled_descriptors
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.records import parse_record, read_records, to_record
from vlm_pg.errors import MESSAGE_LIMIT, VlmPgError
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.types import BadSample, Sample

ROOT = Path(__file__).parents[2]
FORBIDDEN = (
    "socket.connect",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.remove",
    "os.rename",
)
# what a gold answer may take of a grading that no deadline ends
GRADED_CHARACTERS = 2_000


class Watch:
    """What Python opens and starts while it is on."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.allowed: set[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open" and not isinstance(arguments[0], int):
            name = os.fsdecode(arguments[0])
            if name not in self.allowed and not name.endswith((".py", ".pyc")) and "/zoneinfo/" not in name:
                self.noted.append(f"open {name!r}")
        elif event in FORBIDDEN:
            self.noted.append(f"{event}{arguments!r}"[:200])


class Reader:
    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.log = folder / "bad_samples.jsonl"
        self.tokenizer = Tokenizer.from_file(str(ROOT / "assets/tiny-qwen2_5-vl/tokenizer.json"))
        self.rewarder = Rewarder(RewardSettings())
        for name, data in healthy().items():  # what is imported late is imported now
            (folder / name).write_bytes(data)
            read_records(folder / name)
        self.grade(
            [
                parse_record(good(1) | {"problem_type": kind, "solution": "<answer>1</answer>"})
                for kind in ("mathematics", "box")
            ]
        )
        self.watch = Watch()
        self.descriptors = len(descriptors())

    def read(self, path: Path) -> dict[str, Any]:
        self.log.unlink(missing_ok=True)
        self.watch.allowed = {str(path), str(self.log)}
        samples: list[Sample] = []
        bad: list[BadSample] = []
        started = time.process_time()
        try:
            samples, bad = read_records(path)
        except VlmPgError as error:
            outcome = {"refused": str(error)}
        else:
            outcome = {}
        seconds = time.process_time() - started
        self.write_log(samples, bad)
        self.watch.allowed = None
        for sample in samples:
            self.survive(sample)
        self.grade(samples)
        if samples:
            record_oracle.check(samples, path)
        for fault in bad:
            assert len(fault.message) <= MESSAGE_LIMIT + 10 and len(fault.sample_id) <= 300
            assert (fault.message + fault.sample_id + fault.where).isprintable(), fault
            assert re.search(r":[0-9]+(, record [0-9]+)?$", fault.where) and str(fault).isprintable()
        noted, self.watch.noted = self.watch.noted, []
        return outcome | {
            "accepted": len(samples),
            "reasons": [fault.reason for fault in bad],
            "seconds": seconds,
            "noted": noted,
            "descriptors": settled_descriptors(self.descriptors),
        }

    def survive(self, sample: Sample) -> None:
        """What a run does with a sample: written and read back, given to the tokenizer."""
        line = json.dumps(to_record(sample), ensure_ascii=False).encode("utf-8", "backslashreplace")
        assert parse_record(json.loads(line)) == sample
        for text in (sample.question, *sample.options):
            assert self.tokenizer.encode(text).ids

    def write_log(self, samples: list[Sample], bad: list[BadSample]) -> None:
        """All faults, and one of each accepted sample; what is written is known again after a resume."""
        faults = [*bad, *(BadSample(sample.sample_id, "corrupt_media", "why", "records.jsonl") for sample in samples)]
        log = BadSampleLog(self.log, 1, 1)
        for fault in faults:
            log.record(fault)
        again = BadSampleLog(self.log, 1, 1)
        size = self.log.stat().st_size if faults else 0
        for fault in faults:
            assert not again.record(fault), fault
        assert not faults or self.log.stat().st_size == size

    def grade(self, samples: list[Sample]) -> None:
        """Each gold answer can be graded; those without end by their beginning."""
        short = [replace(sample, answer=sample.answer[:GRADED_CHARACTERS]) for sample in samples]
        rewards = self.rewarder.score([Response(sample, f"<answer>{sample.answer}</answer>") for sample in short])
        for sample, reward in zip(short, rewards, strict=True):
            assert sample.answer_kind != "multiple_choice" or reward.parts["accuracy"] == 1.0, sample


def main() -> None:
    reader = Reader(Path(sys.argv[1]))
    print(json.dumps({"descriptors": reader.descriptors}), flush=True)
    for line in sys.stdin:
        print(json.dumps(reader.read(Path(json.loads(line)))), flush=True)
    reader.rewarder.close()


if __name__ == "__main__":
    main()
