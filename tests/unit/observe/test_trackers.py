"""A tracker may refuse, hang or never start: training never waits for it, and it gets every step at most once."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observe.builders import make_group, make_run, read_lines
from vlm_pg.config import load_config
from vlm_pg.errors import ConfigError
from vlm_pg.observe import trackers as module
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.observe.text import dotted
from vlm_pg.observe.tracker_adapters import Adapter, Row, TrackedRun
from vlm_pg.observe.trackers import ADAPTERS, SentSteps, StepReader, Trackers, is_installed, refuse_missing
from vlm_pg.training.main import train

PATIENCE_SECONDS = 120.0


class Recording(Adapter):
    """Logs every call in ``sink.jsonl`` of the run."""

    path: Path
    shown: Sequence[str] = ()

    def start(self, run: TrackedRun) -> str:
        self.path, self.run_id = run.folder.path / "sink.jsonl", run.run_id or "fresh"
        self.log_call(start=run.name, project=run.project, run_id=run.run_id, config=dict(run.config))
        return "at sink.jsonl"

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self.shown = [row.response for row in rows]

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.log_call(step=step, scalars=dict(scalars), rows=self.shown)
        self.shown = ()

    def finish(self, failed: bool) -> None:
        self.log_call(failed=failed)

    def log_call(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


class Raising(Recording):
    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        super().log_scalars(step, scalars)
        raise ConnectionError(f"no route to host,\nstep {step}")


class NeverStarts(Recording):
    def start(self, run: TrackedRun) -> str:
        raise SystemExit("no API key configured")


class AwayAtFirst(Recording):
    """Fails once at its start, then twice in a step."""

    starts = tries = tables = 0

    def start(self, run: TrackedRun) -> str:
        self.starts += 1
        if self.starts == 1:
            raise TimeoutError("away")
        return super().start(run)

    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self.tables += 1
        super().log_rollouts(step, rows)

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.tries += 1
        if self.tries <= 2:
            raise TimeoutError("away")
        super().log_scalars(step, scalars)


class Hanging(Recording):
    """Does not return from its second step until the test ends."""

    released = threading.Event()

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        super().log_scalars(step, scalars)
        if step == 2:
            self.released.wait(PATIENCE_SECONDS)
            raise SystemExit


class Blind(Recording):
    def log_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        self.log_call(tried=step)
        raise ValueError("broken PNG")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", resume=False)


@pytest.fixture
def fed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Adapter]], None]:
    """Lets a class stand for wandb, without pauses between its tries."""
    monkeypatch.setattr(module, "STEP_PAUSES", (0.0,))
    monkeypatch.setattr(module, "START_PAUSES", (0.01,))
    Hanging.released = threading.Event()
    return lambda adapter: monkeypatch.setitem(ADAPTERS, "wandb", adapter)


class Run:
    """A run of a few steps with one tracker; with its lines."""

    def __init__(self, folder: RunFolder, resume_step: int | None = None, **settings: Any):
        settings = {"trackers": ("wandb",), "tracker_seconds": PATIENCE_SECONDS} | settings
        self.folder, self.infos, self.warnings = folder, list[str](), list[str]()
        self.metrics, self.rollouts = MetricsLog(folder, resume_step), RolloutsLog(folder, resume_step=resume_step)
        observe = ObserveSettings(**settings)
        self.trackers = Trackers(observe, folder, "tiny", resume_step, self.infos.append, self.warnings.append)

    def log(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.metrics.write(step, {"reward": step / 8})
            self.rollouts.write(step, [make_group(frames=0)])
            self.trackers.step_done(step)

    def wait_for(self, *steps: int) -> None:
        until(lambda: set(steps) <= set(sent_steps(self.folder)))

    def close(self, failed: bool = False) -> None:
        self.trackers.close(failed)
        self.metrics.close()
        self.rollouts.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def logged(folder: RunFolder, key: str) -> list[Any]:
    path = folder.path / "sink.jsonl"
    return [line[key] for line in read_lines(path) if key in line] if path.exists() else []


def sent_steps(folder: RunFolder) -> list[int]:
    return logged(folder, "step")


def test_everything_arrives_in_order(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(Recording)
    folder.write_config("run: {name: tiny}\n")
    run = Run(folder, track_rollouts_every=2, project="mine")
    run.log(1, 4)
    run.close()
    assert sent_steps(folder) == [1, 2, 3, 4]
    assert logged(folder, "scalars") == [{"train/reward": step / 8} for step in range(1, 5)]
    assert [len(rows) for rows in logged(folder, "rows")] == [2, 2, 0, 2]
    assert (logged(folder, "start"), logged(folder, "project")) == (["tiny"], ["mine"])
    assert logged(folder, "config") == [{"run.name": "tiny"}] and logged(folder, "failed") == [False]
    assert run.infos == ["wandb: at sink.jsonl"] and run.warnings == []


def test_a_resumed_run_goes_on_where_the_tracker_is(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(Recording)
    run = Run(folder)
    run.log(1, 5)
    run.close(failed=True)
    run = Run(folder, resume_step=3)
    run.log(4, 7)
    run.close()
    assert sent_steps(folder) == [1, 2, 3, 4, 5, 6, 7] and logged(folder, "run_id") == [None, "fresh"]
    assert logged(folder, "failed") == [True, False]
    assert "wandb has the steps up to 5 already: those from 4 on are not sent again" in run.infos


def test_a_resume_sends_what_an_earlier_process_did_not(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    """The step that was being sent is left out rather than sent twice."""
    fed_by(Hanging)
    run = Run(folder, tracker_seconds=0)
    run.log(1, 4)
    run.wait_for(2)
    run.close()
    assert sent_steps(folder) == [1, 2]
    fed_by(Recording)
    run = Run(folder, resume_step=4)
    run.close()  # without a further step
    assert sent_steps(folder) == [1, 2, 3, 4]
    Hanging.released.set()


def test_a_tracker_that_is_away_for_a_while_misses_nothing(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(AwayAtFirst)
    module.STEP_PAUSES = (0.0, 0.0)
    run = Run(folder, track_rollouts_every=2)
    until(lambda: bool(logged(folder, "start")))
    run.log(1, 4)
    run.wait_for(1, 2, 3, 4)
    adapter: Any = run.trackers._feeds[0]._adapter
    run.close()
    assert sent_steps(folder) == [1, 2, 3, 4] and (adapter.tables, adapter.tries) == (3, 6)  # tables are not sent twice
    assert len(run.warnings) == 1 and "wandb could not start (TimeoutError: away). The run goes on" in run.warnings[0]


def test_refused_steps_cost_one_warning_and_a_count(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(Raising)
    run = Run(folder)
    for step in range(1, 5):
        run.log(step, step)
        until(lambda: sent_steps(folder).count(step) == 2)  # noqa: B023
    run.close()
    first, last = run.warnings
    log = folder.trackers / "wandb.log"
    assert first == (
        "observe.trackers: wandb failed in step 1 (ConnectionError: no route to host,\\nstep 1). The run goes on; "
        f"metrics.jsonl has everything. ({log} has more.)"
    )
    assert "wandb did not take 4 of the steps 1 to 4, or not in full. metrics.jsonl has them." in last
    assert log.read_text().count("test_trackers.py") == 8 and logged(folder, "failed") == [False]
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3, 4]


def test_a_refused_table_costs_no_number(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(Blind)
    run = Run(folder, track_rollouts_every=2)
    run.log(1, 4)
    run.wait_for(1, 2, 3, 4)
    run.close()
    assert sent_steps(folder) == [1, 2, 3, 4] and set(logged(folder, "tried")) == {1, 2, 4}
    assert "wandb failed in step 1 (ValueError: broken PNG)" in run.warnings[0]
    assert "did not take 3 of the steps 1 to 4, or not in full" in run.warnings[1]


def test_a_tracker_that_never_starts_costs_two_lines(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(NeverStarts)
    run = Run(folder)
    run.log(1, 3)
    run.close()
    assert len(run.warnings) == 2 and "wandb could not start (SystemExit: no API key configured)" in run.warnings[0]
    assert "wandb could not start while the run lasted" in run.warnings[1]


def test_a_tracker_that_hangs_is_reported_and_left(
    folder: RunFolder, fed_by: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed_by(Hanging)
    run = Run(folder, tracker_seconds=0)
    run.log(1, 3)
    run.wait_for(2)
    assert run.warnings == []
    monkeypatch.setattr(module, "STALL_SECONDS", 0.0)
    run.log(4, 6)
    stalled = r"wandb has taken nothing for \d+ s and is at step 1\. The run goes on; metrics.jsonl has everything\."
    assert len(run.warnings) == 1 and re.search(stalled, run.warnings[0])
    run.close()
    assert "wandb was still sending and was left (the end of a run waits observe.tracker_seconds)" in run.warnings[1]
    assert "It was given the steps up to 1 of 6; metrics.jsonl has them all" in run.warnings[1]
    Hanging.released.set()


def test_an_interrupted_run_does_not_wait(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    fed_by(Hanging)
    run = Run(folder, tracker_seconds=1000)
    run.log(1, 2)
    start_seconds = time.monotonic()
    with pytest.raises(KeyboardInterrupt), run.trackers:
        raise KeyboardInterrupt
    assert time.monotonic() - start_seconds < 10.0
    Hanging.released.set()


def test_steps_of_another_runs_checkpoint_are_not_missing(folder: RunFolder, fed_by: Callable[..., None]) -> None:
    """Its metrics are in that run's folder."""
    fed_by(Recording)
    run = Run(folder, resume_step=50)
    run.close()
    assert sent_steps(folder) == [] and run.warnings == []


def test_a_state_that_cannot_be_written_holds_steps_back(
    folder: RunFolder, fed_by: Callable[..., None], tmp_path: Path
) -> None:
    """A step sent without a record of it would be sent again after a resume."""
    fed_by(Recording)
    run = Run(folder)
    run.log(1, 1)
    run.wait_for(1)
    folder.trackers.rename(tmp_path / "aside")
    run.log(2, 3)
    run.close()
    assert sent_steps(folder) == [1] and len(run.warnings) == 2
    assert "wandb cannot be supplied from the run's files (FileNotFoundError" in run.warnings[0]
    assert "wandb is incomplete. It was given the steps up to 1 of 3; metrics.jsonl has them all" in run.warnings[1]
    (tmp_path / "aside").rename(folder.trackers)
    run = Run(folder, resume_step=3)
    run.close()
    assert sent_steps(folder) == [1, 2, 3] and run.warnings == []


# ---- what is read from the run's files ----


def test_every_number_of_every_step_comes_once_under_its_phase(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    reader = StepReader(folder, after_step=0, every=0)
    given = list(reader.read(2)) + list(reader.read(4)) + list(reader.read(4))
    own = ("step", "phase", "time", "grad_norm")
    assert [(step, scalars) for step, scalars, _ in given] == [
        (line["step"], {f"train/{key}": line[key] for key in line if key not in own})
        for line in read_lines(folder.metrics)
    ]
    assert len(given[0][1]) == 5 and "train/grad_norm" not in given[0][1]  # null is no number


@pytest.mark.parametrize("every, steps", [(0, []), (2, [1, 2, 4]), (25, [1])])
def test_rollouts_come_in_the_first_step_and_every_so_many(every: int, steps: list[int], tmp_path: Path) -> None:
    given = [one for one in StepReader(make_run(tmp_path / "run", steps=4), 0, every).read(4) if one[2]]
    assert [step for step, _, _ in given] == steps
    for _, _, rows in given:
        assert [row.response for row in rows] == ["<think>red blue</think><answer>B</answer>", "<answer>A</answer>"]
        assert [(row.reward, row.advantage) for row in rows] == [(1.1, 0.7), (0.1, pytest.approx(-0.7))]
        assert rows[0].parts == "accuracy 1.0, format 1.0"
        assert rows[0].question == "Which colour is first?\nA. red\nB. blue" and rows[0].answer == "B"
        assert rows[0].picture is not None and rows[0].picture.is_file()


def test_sent_steps_are_left_out_and_a_step_that_failed_comes_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    assert [(step, len(rows)) for step, _, rows in StepReader(folder, 3, 1).read(9)] == [(4, 2)]
    reader = StepReader(folder, 0, 1)
    for step, _, _ in reader.read(4):
        if step == 3:
            break
    assert [(step, len(rows)) for step, _, rows in reader.read(4)] == [(3, 2), (4, 2)]


def test_unfinished_lines_wait_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    reader = StepReader(folder, 0, 1)
    assert list(reader.read(9)) == []
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 1, "phase": "train", "reward": 1.0}\n{broken\n{"no": "step"}\n{"step": 2, "phase": "tra')
        file.flush()
        assert [step for step, _, _ in reader.read(9)] == [1]
        file.write(
            b'in", "reward": 2.0}\n{"step": 2, "phase": ["eval"]}\n{"step": 2, "phase": "eval", "reward": true}\n'
        )
        file.flush()
        assert [scalars for _, scalars, _ in reader.read(9)] == [{"train/reward": 2.0}, {"eval/reward": True}]
    folder = make_run(tmp_path / "other", steps=2)
    line = read_lines(folder.rollouts)[0]
    odd = [{key: value for key, value in line.items() if key != "options"}, line | {"parts": 3}, line | {"question": 1}]
    odd += [line | {"phase": ["train"]}, line | {"options": None}, line | {"thumbnails": 7}]
    with folder.rollouts.open("a") as lines:
        lines.writelines(json.dumps(one) + "\n" for one in odd)
    assert [(step, len(rows)) for step, _, rows in StepReader(folder, 0, 1).read(2)] == [(1, 2), (2, 2)]


def test_long_texts_are_cut_and_control_characters_shown(tmp_path: Path) -> None:
    texts = ("a" * 30_000, "\x1b[31mred\u202e \ud800 \x07")
    folder = make_run(tmp_path / "run", steps=1, groups=[make_group(texts=texts)])
    ((_, _, rows),) = StepReader(folder, 0, 1).read(1)
    assert len(rows[0].response) < 10_100 and "[... 20,000 characters left out ...]" in rows[0].response
    assert rows[1].response == "\u241b[31mred\ufffd \ufffd \u2407"


def test_nested_settings_have_dotted_keys() -> None:
    nested = {"rollout": {"num_generations": 8, "stop": ["a"]}, "data": {"eval": {"seen": "x.jsonl"}}, "n": {}}
    assert dict(dotted(nested)) == {
        "rollout.num_generations": 8,
        "rollout.stop": ["a"],
        "data.eval.seen": "x.jsonl",
        "n": {},
    }


def test_a_state_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    assert SentSteps.read(path) == SentSteps(None, 0)
    for content in (b"{", b"[1]", b'{"run_id": 3, "step": "four"}', b'{"step": true}'):
        path.write_bytes(content)
        assert SentSteps.read(path) == SentSteps(None, 0)
    path.write_text('{"run_id": "abc", "step": 7}')
    assert SentSteps.read(path) == SentSteps("abc", 7)


# ---- a tracker that is not installed ----


def test_a_missing_tracker_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "is_installed", lambda name: name != "mlflow")
    refuse_missing(["tensorboard", "wandb", "swanlab"])
    with pytest.raises(ConfigError) as refused:
        refuse_missing(["tensorboard", "mlflow"])
    assert str(refused.value) == (
        "observe.trackers names mlflow, which is not installed. It is optional: install it with 'pip install "
        "mlflow-skinny sqlalchemy alembic', or set observe.trackers=[tensorboard]."
    )
    (tmp_path / "a_tracker_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_tracker_folder") and not is_installed("no_such_tracker_package") and is_installed("yaml")


def test_a_run_says_so_before_it_reads_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_installed", lambda _: False)
    (tmp_path / "run.yaml").write_text(
        "model: {path: there/is/none}\ndata: {train: there/is/none.jsonl}\ntraining: {steps: 1}\n"
    )
    config = load_config(tmp_path / "run.yaml", ["observe.trackers=[mlflow]", f"run.dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match=r"observe\.trackers names mlflow, which is not installed"):
        train(config)
    assert not (tmp_path / "run").exists()
