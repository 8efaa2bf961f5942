"""trace.json is a whole JSON array at any moment, of a bounded size, and its slices nest."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ModuleProcess
from vlm_pg.distributed import RankLayout
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.timeline import ArrayFile, Timeline
from vlm_pg.training.phases import Phases


def events_of(path: Path) -> list[dict[str, Any]]:
    """The slices of a time line."""
    return [event for event in json.loads(path.read_bytes()) if event["ph"] == "X"]


def recorded(folder: Path, megabytes: int = 1, steps: int = 2, phases_per_step: int = 2) -> tuple[Timeline, Phases]:
    """A time line of one rank, flushed after every step."""
    phases, timeline = Phases(), Timeline(RankLayout(), megabytes)
    phases.observers.append(timeline)
    with phases.timed("setup"):
        timeline.open(RunFolder(folder))
    for step in range(1, steps + 1):
        with timeline.step(step):
            for _ in range(phases_per_step):
                with phases.timed("train"), phases.timed("idle"):
                    pass
            timeline.flush()
    return timeline, phases


def test_slices_nest_and_say_their_step(tmp_path: Path) -> None:
    timeline, _ = recorded(tmp_path)
    timeline.close()
    named, slices = json.loads((tmp_path / "trace.json").read_bytes())[:3], events_of(tmp_path / "trace.json")
    assert [event["name"] for event in named] == ["process_name", "process_sort_index", "thread_name"]
    assert re.fullmatch(r"rank 0 \(.+\)", named[0]["args"]["name"])
    of_a_step = ["idle", "train", "idle", "train", "step"]
    assert [event["name"] for event in slices] == ["setup", *of_a_step, *of_a_step]
    assert [event["args"].get("step") for event in slices] == [None, *[1] * 5, *[2] * 5]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in slices]
    for first in spans:
        for second in spans:
            apart = first[1] <= second[0] or second[1] <= first[0]
            within = first[0] <= second[0] <= second[1] <= first[1] or second[0] <= first[0] <= first[1] <= second[1]
            assert apart or within
    for inner, outer in ((1, 2), (3, 4), (2, 5), (4, 5)):
        assert spans[outer][0] <= spans[inner][0] and spans[inner][1] <= spans[outer][1]


def test_what_lies_within_a_phase_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    phases = Phases()
    with phases.timed("train"):
        now[0] += 3
        with phases.timed("idle"):
            now[0] += 2
            with phases.timed("logs"):
                now[0] += 1
        with phases.timed("idle"):
            now[0] += 4
        now[0] += 5
    assert phases.seconds == phases.of_step == {"train": 8.0, "idle": 6.0, "logs": 1.0}


def test_a_single_rank_never_waits() -> None:
    alone, several = Phases(), Phases(RankLayout(0, 2))
    for phases in (alone, several):
        with phases.waiting():
            pass
    assert "idle" not in alone.seconds and "idle" in several.seconds


def test_a_time_line_goes_on_after_a_resume(tmp_path: Path) -> None:
    for _ in range(2):
        timeline, _ = recorded(tmp_path, steps=1)
        timeline.close()
    slices = events_of(tmp_path / "trace.json")
    assert [event["name"] for event in slices if event["name"] in ("setup", "step")] == ["setup", "step"] * 2
    starts = [event["ts"] for event in slices if event["name"] == "step"]
    assert starts == sorted(starts)


def test_the_files_are_bounded_and_the_last_steps_stay(tmp_path: Path) -> None:
    timeline, _ = recorded(tmp_path, steps=400, phases_per_step=40)
    timeline.close()
    files = [tmp_path / "trace.json", tmp_path / "trace.before.json"]
    a_step = 81 * 110
    assert sum(file.stat().st_size for file in files) <= 2**20 + 2 * a_step
    before, after = ([event["args"]["step"] for event in events_of(file)] for file in files[::-1])
    assert after[-1] == 400 and before[-1] <= after[0] and min(before) > 50
    assert json.loads(files[0].read_bytes())[0]["name"] == "process_name"


def test_none_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    timeline, _ = recorded(tmp_path, megabytes=0)
    timeline.close()
    assert list(tmp_path.iterdir()) == []


def test_phases_before_an_error_are_written(tmp_path: Path) -> None:
    timeline, phases = recorded(tmp_path, steps=1)
    with pytest.raises(RuntimeError), timeline.step(2), phases.timed("train"):
        raise RuntimeError
    timeline.close()
    assert [event["name"] for event in events_of(tmp_path / "trace.json")][-2:] == ["train", "step"]


def test_an_array_is_whole_after_every_append_and_moved_aside_where_it_was_cut(tmp_path: Path) -> None:
    """Cut at every byte, as a full disk or a power cut may."""
    items = [{"a": 1}, {"b": "},\n{"}, {"c": [1, 2]}]
    whole = tmp_path / "whole.json"
    file = ArrayFile(whole)
    assert json.loads(whole.read_bytes()) == []
    for count, item in enumerate(items, start=1):
        file.append([item])
        assert json.loads(whole.read_bytes()) == items[:count]
        assert whole.stat().st_size == file.num_bytes
    file.close()
    data = whole.read_bytes()
    for cut in range(len(data) + 1):
        path = tmp_path / "cut.json"
        path.write_bytes(data[:cut])
        file = ArrayFile(path)
        file.append(["further"])
        file.close()
        assert json.loads(path.read_bytes()) == ([*items, "further"] if cut == len(data) else ["further"])
        assert cut == len(data) or path.with_name("cut.json.damaged").read_bytes() == data[:cut]


def test_what_is_no_array_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("not ours")
    ArrayFile(path).close()
    assert json.loads(path.read_bytes()) == [] and path.with_name("trace.json.damaged").read_text() == "not ours"


def test_a_killed_writer_leaves_a_whole_array(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for least in (1_000, 900_000):
        writer = ModuleProcess("tests.unit.observe.test_trace", str(path))
        while not path.exists() or path.stat().st_size < least:
            assert writer.returncode is None, writer.printed
        writer.signal(signal.SIGKILL)
        writer.finish()
        assert writer.returncode == -signal.SIGKILL
        try:
            numbers = json.loads(path.read_bytes())
        except json.JSONDecodeError:
            # Ended between two pages of its last call, which is seldom met: what follows moves it aside.
            assert path.stat().st_size % mmap.PAGESIZE == 0
            ArrayFile(path).close()
            assert path.with_name("trace.json.damaged").exists()
            continue
        assert numbers and all(set(item) == {"number", "text"} for item in numbers)


def test_a_full_disk_names_the_file() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    file = ArrayFile.__new__(ArrayFile)
    file._path, file.num_bytes, file._file = Path("/dev/full"), 5, os.open("/dev/full", os.O_RDWR)
    with pytest.raises(OSError, match="/dev/full"):
        file.append([1])
    file.close()


def append_until_killed(path: Path) -> None:
    file = ArrayFile(path)
    for number in itertools.count():
        file.append([{"number": number, "text": "x" * (number % 300)}] * 3)


if __name__ == "__main__":
    append_until_killed(Path(sys.argv[1]))
