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

from tests.support.record_files import good, healthy
from tests.support.watch import descriptors, settled_descriptors
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.fields import WRITTEN_NAMES
from vlm_pg.data.records import parse_record, read_records, to_record
from vlm_pg.errors import MESSAGE_LIMIT, VlmPgError
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.types import BadSample, Sample

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
CHANGES = ("os.remove", "os.rename")
# what a gold answer may take of a grading that no deadline ends
GRADED_CHARACTERS = 2_000


class Watch:
    """What Python opens and starts while it is on."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.allowed: set[str] | None = None
        sys.addaudithook(self._log)

    def _log(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open" and not isinstance(arguments[0], int):
            name = os.fsdecode(arguments[0])
            if name not in self.allowed and not name.endswith((".py", ".pyc")) and "/zoneinfo/" not in name:
                self.logged.append(f"open {name!r}")
        elif event in (*FORBIDDEN, *CHANGES):
            self.logged.append(f"{event}{arguments!r}"[:200])


class Reader:
    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.log = folder / "bad_samples.jsonl"
        self.tokenizer = Tokenizer.from_file(str(ROOT / "assets/tiny-qwen2_5-vl/tokenizer.json"))
        self.rewarder = Rewarder(RewardSettings())
        for name, data in healthy().items():  # what is imported late is imported now
            (folder / name).write_bytes(data)
            read_records(folder / name)
        late = good(1) | {"solution": "<answer>1</answer>"}
        self.grade([parse_record(late | {"problem_type": kind}) for kind in ("mathematics", "box")])
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
            check(samples, path)
        for fault in bad:
            assert len(fault.message) <= MESSAGE_LIMIT + 10 and len(fault.sample_id) <= 300
            assert (fault.message + fault.sample_id + fault.where).isprintable(), fault
            assert re.search(r":[0-9]+(, record [0-9]+)?$", fault.where) and str(fault).isprintable()
        logged, self.watch.logged = self.watch.logged, []
        return outcome | {
            "accepted": len(samples),
            "reasons": [fault.reason for fault in bad],
            "seconds": seconds,
            "logged": logged,
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
        BadSampleLog(self.log, 1, 1).record_tried(len(faults), faults)
        size = self.log.stat().st_size if faults else 0
        BadSampleLog(self.log, 1, 1).record_tried(len(faults), faults)
        assert not faults or self.log.stat().st_size == size

    def grade(self, samples: list[Sample]) -> None:
        """Each gold answer can be graded; those without end by their beginning."""
        short = [replace(sample, answer=sample.answer[:GRADED_CHARACTERS]) for sample in samples]
        rewards = self.rewarder.score([Response(sample, f"<answer>{sample.answer}</answer>") for sample in short])
        for sample, reward in zip(short, rewards, strict=True):
            assert sample.answer_kind != "multiple_choice" or reward.parts["accuracy"] == 1.0, sample


# ---- the oracle: a second reader, written in another way ----


class _Object(dict[str, Any]):
    """An object of JSON that remembers which names have different values."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        self.twice = {name for name, value in pairs if value != self[name]}


def records_in(path: Path) -> list[Any]:
    """All records of a file that was accepted."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path.open("rb")) as file:
            table = file.read()
        assert len(set(table.column_names)) == len(table.column_names)
        return [{name: _cell(table[name][row]) for name in table.column_names} for row in range(table.num_rows)]
    text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    options: dict[str, Any] = {"object_pairs_hook": _Object, "parse_int": lambda digits: digits}
    if path.suffix == ".json":
        return json.loads(text, **options)
    return [json.loads(line, **options) for line in re.split("\r\n|\n|\r", text) if line.strip()]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except Exception:
        return None


def check(samples: list[Sample], path: Path) -> None:
    """Each sample is what the record of its name says, and that record can be read in one way only."""
    records = records_in(path)
    for sample in samples:
        named = [
            record
            for record in records
            if isinstance(record, dict) and str(record.get("problem_id")) == sample.sample_id
        ]
        named = named or [record for record in records if isinstance(record, dict) and sample.sample_id == "0"]  # "-0"
        assert any(_is(sample, record) for record in named), f"{sample!r:.500} is not what {named!r:.500} says"


def _is(sample: Sample, record: Any) -> bool:
    if getattr(record, "twice", None):
        return False
    options, kind, paths = record.get("options") or [], record.get("problem_type"), record.get("path") or []
    return (
        sample.question == record.get("problem")
        and (list(sample.options) == options or [option[3:] for option in sample.options] == options)
        and _spelling(WRITTEN_NAMES[sample.answer_kind]) == _spelling(kind)
        and [ref.path for ref in sample.media]
        == ([paths] if isinstance(paths, str) and paths else [one for one in paths if one])
        and _golds(sample, options, record["solution"]) == {sample.answer}
    )


def _spelling(kind: str) -> str:
    return re.sub(r"[\s_/-]+", " ", kind.strip().lower())


def _golds(sample: Sample, options: list[str], solution: str) -> set[str]:
    """Every way to read the gold answer."""
    _, *tagged = solution.split("<answer>")
    if not all("</answer>" in part for part in tagged):
        return set()
    texts = {part.split("</answer>", 1)[0].strip() for part in tagged}
    if len(texts) > 1:
        return texts
    (text,) = texts
    if sample.answer_kind != "multiple_choice":
        return {text}
    were_lettered = list(sample.options) == options
    if were_lettered and len(text) == 1 and "A" <= text <= "Z":
        return {text}
    readings = set()
    for option in sample.options:
        letter, shown = re.match(r"\s*\(?([A-Z])\s*[.):]\s*(.*)", option, re.DOTALL).groups()  # type: ignore[union-attr]
        cases = (letter, letter.lower())
        spellings = {
            f"{opens}{one}{closes}{sign}"
            for opens in ("(", "")
            for one in cases
            for closes in (")", "")
            for sign in (".", ")", ":", "")
        }
        found = re.match(r"\s*\(?([A-Z])\s*[.):]\s*(.*)", text, re.DOTALL)
        if text in spellings or text == shown.strip() or (found and found.groups() == (letter, shown.strip())):
            readings.add(letter)
    return readings


def main() -> None:
    reader = Reader(Path(sys.argv[1]))
    print(json.dumps({"descriptors": reader.descriptors}), flush=True)
    for line in sys.stdin:
        print(json.dumps(reader.read(Path(json.loads(line)))), flush=True)
    reader.rewarder.close()


if __name__ == "__main__":
    main()
