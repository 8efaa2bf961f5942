"""Runs whose folder is shared, fills the disk or vanishes: clear errors, and no finished step is lost."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import read_lines
from tests.support.short_run import STEPS, short_run, train_here
from vlm_pg.errors import ServerError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.logs import MetricsLog
from vlm_pg.observe.run_lock import RunLock
from vlm_pg.training import collect, trainer
from vlm_pg.training import main as training
from vlm_pg.training.checkpoints import find_checkpoints

RARELY = "training.checkpoint_every=0"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("runs"))


def steps_saved(run: Path) -> list[int]:
    return [step for step, _ in find_checkpoints(run / "checkpoints")]


@pytest.mark.parametrize("resume", ["auto", pytest.param("never", marks=pytest.mark.matrix)])
def test_a_folder_in_use_is_refused_untouched(config: Path, tmp_path: Path, resume: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock.take(run, print)
    ended = train_here(config, f"run.dir={run}", f"run.resume={resume}")
    assert ended.code == 2 and f"run.dir '{run}' is in use: process" in ended.printed
    assert [path.name for path in run.iterdir()] == ["run.lock"] and list(tmp_path.iterdir()) == [run]
    lock.release()
    assert train_here(config, f"run.dir={run}", "training.steps=1").code == 0
    assert not (run / "run.lock").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_began_while_this_one_loaded_its_model_is_left_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, ended: bool
) -> None:
    """Both have seen that there was no folder yet."""
    run, other = tmp_path / "run", []

    def load_meanwhile(*arguments: Any, **named: Any) -> Policy:
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text("of the other run")
        lock = RunLock.take(run, print)
        other.append(lock)
        if ended:
            lock.release()
        return load_policy(*arguments, **named)

    monkeypatch.setattr(training, "load_policy", load_meanwhile)
    second = train_here(config, f"run.dir={run}", f"run.resume={resume}", "training.steps=1")
    other[0].release()
    moved = list(tmp_path.glob("run.old-*"))
    if ended and resume == "never":  # an earlier run is moved aside
        assert second.code == 0 and (moved[0] / "config.yaml").read_text() == "of the other run"
        return
    words = "Another run has worked in run.dir" if ended else "trains in it"
    assert second.code == 2 and words in second.printed and not moved
    assert (run / "config.yaml").read_text() == "of the other run"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_vanishes_ends_the_run_and_its_steps_are_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    run = tmp_path / "run"
    write = MetricsLog.write

    def write_and_remove(self: MetricsLog, step: int, values: Any, phase: str = "train") -> None:
        write(self, step, values, phase)
        if step == 1:
            shutil.rmtree(run)
            if replaced:
                run.mkdir()

    monkeypatch.setattr(MetricsLog, "write", write_and_remove)
    ended = train_here(config, f"run.dir={run}", RARELY)
    assert ended.code == 2 and f"The run's folder {run} is" in ended.printed
    assert "the checkpoint of step 2 is written" in ended.printed
    (folder,) = tmp_path.glob("run.rescued-*") if replaced else [run]
    assert steps_saved(folder) == [2]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 200 kB: a checkpoint's weights do not fit, logs do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.matrix
def test_a_checkpoint_that_does_not_fit_is_a_clear_error(config: Path, tmp_path: Path, small_files: None) -> None:
    ended = train_here(config, f"run.dir={tmp_path / 'run'}", "observe.rollouts_per_step=0")
    assert ended.code == 2 and "The checkpoint of step 1 could not be written to" in ended.printed
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.matrix
def test_metrics_that_do_not_fit_leave_a_checkpoint(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsLog, step: int, values: Any, phase: str = "train") -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(MetricsLog, "write", full)
    ended = train_here(config, f"run.dir={tmp_path / 'run'}", RARELY)
    assert ended.code == 2 and "metrics.jsonl cannot be used: No space left on device. Make room" in ended.printed
    assert steps_saved(tmp_path / "run") == [1]


@pytest.mark.parametrize("error", [KeyError("message"), ServerError("gone")], ids=repr)
def test_whatever_ends_sampling_keeps_the_steps_before(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    collected = collect.Collector.collect

    def fails(self: Any, step: int, ahead: int) -> Any:
        if step == 3:
            raise error
        return collected(self, step, ahead)

    monkeypatch.setattr(collect.Collector, "collect", fails)
    if isinstance(error, ServerError):
        assert train_here(config, f"run.dir={tmp_path / 'run'}", RARELY).code == 2
    else:
        with pytest.raises(type(error)):
            train_here(config, f"run.dir={tmp_path / 'run'}", RARELY)
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.matrix
def test_an_update_that_fails_is_not_saved(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights belong to no step."""
    run_updates = trainer.run_updates

    def fails(*arguments: Any, **keywords: Any) -> Any:
        run_updates(*arguments, **keywords)
        raise KeyError("late")

    monkeypatch.setattr(trainer, "run_updates", fails)
    with pytest.raises(KeyError):
        train_here(config, f"run.dir={tmp_path / 'run'}", RARELY)
    assert steps_saved(tmp_path / "run") == []


@pytest.mark.matrix
def test_data_changed_under_its_path_is_mentioned(tmp_path: Path) -> None:
    config = short_run(tmp_path)
    assert train_here(config, "training.steps=1").code == 0
    assert "another content" not in train_here(config, "training.steps=2").printed
    records = tmp_path / "records.json"
    records.write_text(records.read_text().replace("How much", "What"))
    ended = train_here(config)
    assert ended.code == 0 and f"data.train={records} has another content than when" in ended.printed


@pytest.mark.matrix
def test_beginning_again_keeps_what_was_logged(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_here(config, f"run.dir={run}", RARELY).code == 0
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    ended = train_here(config, f"run.dir={run}", RARELY)
    assert ended.code == 0 and "no checkpoint of the run" in ended.printed
    (kept,) = run.glob("metrics.jsonl.begun-again-*")
    for file in (kept, run / "metrics.jsonl"):
        assert [line["step"] for line in read_lines(file)] == list(range(1, STEPS + 1))
