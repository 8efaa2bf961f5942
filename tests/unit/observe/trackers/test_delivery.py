"""Whatever a tracker raises, the steps go on: tried again, passed over, told once and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sinks import Blind, Raising, Recording
from tests.unit.observe.builders import make_run, read_lines
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.trackers.delivery import Delivery
from vlm_pg.observe.trackers.sink import Begun, TrackedRun
from vlm_pg.observe.trackers.state import TrackerState
from vlm_pg.observe.trackers.table import Row


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run", steps=4)


def deliver(
    folder: RunFolder, sink: Recording, up_to: int = 4, every: int = 0, **options: Any
) -> tuple[Delivery, list[str]]:
    said: list[str] = []
    delivery = Delivery("stub", sink, TrackedRun(folder, "project", "tiny", {}), every, said.append, **options)
    if delivery.begin() is not None:
        delivery.deliver(up_to)
        delivery.finish(failed=False)
    return delivery, said


def taken(folder: RunFolder) -> list[int]:
    return [line["step"] for line in read_lines(folder.path / "sink.jsonl") if "step" in line]


class FailsTwice(Recording):
    """Is away for the first two tries of a step, and once when it begins."""

    tries = begins = 0

    def begin(self, run: TrackedRun) -> Begun:
        self.begins += 1
        if self.begins == 1:
            raise TimeoutError("away")
        return super().begin(run)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.tries += 1
        if self.tries <= 2:
            raise TimeoutError("away")
        super().scalars(step, scalars)


def test_a_step_is_tried_again_after_pauses_and_nothing_is_missing(folder: RunFolder) -> None:
    waited: list[float] = []
    sink = FailsTwice()
    sink.begins = 1
    delivery, said = deliver(folder, sink, pauses=(2.0, 10.0, 45.0), wait=lambda s: not waited.append(s))
    assert taken(folder) == [1, 2, 3, 4] and delivery.missing == [] and waited == [2.0, 10.0]
    assert said == [
        "observe.trackers: stub failed in step 1 (TimeoutError: away). The run goes on; metrics.jsonl has everything."
    ]


def test_a_step_that_is_refused_is_passed_over_and_told_of_once(folder: RunFolder) -> None:
    traces: list[Exception] = []
    delivery, said = deliver(folder, Raising(), pauses=(1.0,), wait=lambda s: True, trace=traces.append)
    assert taken(folder) == [1, 1, 2, 2, 3, 3, 4, 4] and delivery.missing == [1, 2, 3, 4] and delivery.step == 4
    assert len(said) == 1 and "\n" not in said[0] and "(ConnectionError: no route to host,\\nstep 1)" in said[0]
    assert len(traces) == 8


def test_without_time_for_pauses_each_step_is_tried_once(folder: RunFolder) -> None:
    delivery, _ = deliver(folder, Raising(), pauses=(1.0, 1.0), wait=lambda s: False)
    assert taken(folder) == [1, 2, 3, 4] and delivery.missing == [1, 2, 3, 4]


def test_what_fails_at_the_start_can_begin_later(folder: RunFolder) -> None:
    sink = FailsTwice()
    sink.tries = 2
    said: list[str] = []
    delivery = Delivery("stub", sink, TrackedRun(folder, "project", "tiny", {}), 0, said.append)
    assert delivery.begin() is None and "stub could not begin (TimeoutError: away)" in said[0]
    assert delivery.begin() == "at sink.jsonl"
    delivery.deliver(4)
    assert taken(folder) == [1, 2, 3, 4] and len(said) == 1


def test_a_further_start_goes_on_with_the_same_run_after_its_last_step(folder: RunFolder) -> None:
    state = folder.path / "stub.json"
    deliver(folder, Recording(), up_to=2, state=state)
    assert TrackerState.read(state) == TrackerState("fresh", 2)
    deliver(folder, Recording(), state=state)
    assert taken(folder) == [1, 2, 3, 4]
    assert [line["run_id"] for line in read_lines(folder.path / "sink.jsonl") if "begin" in line] == [None, "fresh"]


def test_a_process_that_dies_in_a_step_leaves_a_gap_and_no_step_twice(folder: RunFolder) -> None:
    class Killed(Recording):
        def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            super().scalars(step, scalars)
            if step == 2:
                raise KeyboardInterrupt  # as little is caught of it as of a kill

    state = folder.path / "stub.json"
    with pytest.raises(KeyboardInterrupt):
        deliver(folder, Killed(), state=state)
    deliver(folder, Recording(), state=state)
    assert taken(folder) == [1, 2, 3, 4]


def test_files_that_cannot_be_read_end_nothing(folder: RunFolder) -> None:
    folder.metrics.unlink()
    folder.metrics.mkdir()
    _, said = deliver(folder, Recording())
    assert len(said) == 1 and "stub cannot be supplied from the run's files (IsADirectoryError" in said[0]


def test_a_table_that_is_refused_costs_no_number_and_nothing_is_given_twice(folder: RunFolder) -> None:
    """A tracker may keep every value it is given."""
    delivery, said = deliver(folder, Blind(), every=2, pauses=(1.0,), wait=lambda s: True)
    assert taken(folder) == [1, 2, 3, 4] and delivery.missing == [1, 2, 4]
    tried = [line["tried"] for line in read_lines(folder.path / "sink.jsonl") if "tried" in line]
    assert (
        tried == [1, 1, 2, 2, 4, 4] and len(said) == 1 and "stub failed in step 1 (ValueError: broken PNG)" in said[0]
    )

    class AwayOnce(FailsTwice):
        tables = 0

        def rollouts(self, step: int, rows: Sequence[Row]) -> None:
            self.tables += 1
            super().rollouts(step, rows)

    sink = AwayOnce()
    sink.begins, sink.tries = 1, 1
    (folder.path / "sink.jsonl").unlink()
    delivery, _ = deliver(folder, sink, every=2, pauses=(1.0,), wait=lambda s: True)
    assert (taken(folder), delivery.missing, sink.tables, sink.tries) == ([1, 2, 3, 4], [], 3, 6)


def test_a_state_that_cannot_be_written_holds_steps_back_and_loses_none(folder: RunFolder) -> None:
    """Whoever hands over what is not noted hands it over again after a resume."""
    state, said = folder.path / "states" / "stub.json", list[str]()
    run = TrackedRun(folder, "project", "tiny", {})
    delivery = Delivery("stub", Recording(), run, 2, said.append, state=state)
    assert delivery.begin() is None and "stub could not begin (FileNotFoundError" in said[0]
    state.parent.mkdir()
    assert delivery.begin() is not None and delivery.deliver(1)
    state.unlink()
    state.parent.rmdir()
    assert not delivery.deliver(3) and taken(folder) == [1]
    state.parent.mkdir()
    assert delivery.deliver(4) and taken(folder) == [1, 2, 3, 4] and delivery.missing == []
    lines = read_lines(folder.path / "sink.jsonl")
    assert len([line for line in lines if "begin" in line]) == 1
    assert [len(line["rows"]) for line in lines if "step" in line] == [2, 2, 0, 2]
    assert TrackerState.read(state) == TrackerState("fresh", 4) and len(said) == 1
