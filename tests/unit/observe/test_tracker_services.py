"""The real trackers, without a network: every number of metrics.jsonl once, tables with pictures, a resumed run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import tracker_files
from tests.support.tracker_files import expected_scalars
from tests.unit.observe.builders import make_group, read_lines
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings, TrackerName
from vlm_pg.observe.tracker_adapters import MlflowAdapter, TrackedRun
from vlm_pg.observe.trackers import Trackers, is_installed

CONFIG = "run: {name: tiny}\nmodel: {path: assets/tiny, dtype: null}\nrollout: {num_generations: 8}\n"
HOSTILE = "<script>alert(1)</script> ![](http://127.0.0.1/a.png) --x_x--0_0--{}--x_x--0_0-- \x1b[31m \ud800 中文"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_installed(name), reason=f"{name} is optional and not installed here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # the adapter sets it; restored after the test
    monkeypatch.delenv("WANDB_DATA_DIR")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "run", resume=False)
    folder.write_config(CONFIG)
    return folder


def track(tracker: TrackerName, folder: RunFolder, first: int, last: int, resume_step: int | None = None) -> list[str]:
    """Steps of a run, some with rollouts; returns all lines."""
    lines: list[str] = []
    observe = ObserveSettings(trackers=(tracker,), track_rollouts_every=3, project="proj", tracker_seconds=600)
    with (
        MetricsLog(folder, resume_step) as metrics,
        RolloutsLog(folder, resume_step=resume_step) as rollouts,
        Trackers(observe, folder, "tiny", resume_step, lines.append, lines.append) as trackers,
    ):
        for step in range(first, last + 1):
            metrics.write(step, {"reward": step / 7, "kl": 1e-9 * step, "groups": step, "a/b c": -step, "none": None})
            rollouts.write(step, [make_group("b", texts=(HOSTILE, "B")), make_group("a", frames=7)])
            trackers.step_done(step)
    return lines


def start_again(tracker: TrackerName, folder: RunFolder) -> None:
    """Steps 1 to 5, then a resume after step 3 up to step 7: steps 4 and 5 are logged a second time."""
    lines = track(tracker, folder, 1, 5) + track(tracker, folder, 4, 7, resume_step=3)
    assert not [line for line in lines if line.startswith("observe.trackers")], lines
    assert f"{tracker} has the steps up to 5 already: those from 4 on are not sent again" in lines
    assert [line["step"] for line in read_lines(folder.metrics)] == list(range(1, 8))


@needs("wandb")
def test_wandb_has_every_number_once_over_a_resume_and_tables(folder: RunFolder) -> None:
    start_again("wandb", folder)
    files = sorted((folder.trackers / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # one run in two parts
    table: dict[str, list[tuple[int, float]]] = {}
    for step, values in (entry for file in files for entry in tracker_files.wandb_steps(file)):
        for key in filter(lambda key: key.startswith("train/"), values):
            table.setdefault(key, []).append((step, values[key]))
    assert table == expected_scalars(folder, float)
    config = tracker_files.wandb_config(files[0])
    assert config["rollout.num_generations"] == 8 and config["model.dtype"] is None and config["run.name"] == "tiny"
    drawn = [step for file in files for step, values in tracker_files.wandb_steps(file) if "rollouts.path" in values]
    assert drawn == [1, 3, 6]
    contents = list(tracker_files.wandb_artifacts(files[0]))[-1]
    assert all(folder.trackers / "wandb-data" in path.parents for path in contents.values())
    rollouts = json.loads(contents["rollouts.table.json"].read_text())
    assert rollouts["columns"] == ["sample", "question", "answer", "response", "reward", "advantage", "frames"]
    first, *_ = rows = rollouts["data"]
    assert len(rows) == 4 and first[3].startswith("<script>") and "\x1b" not in first[3] and first[4:6] == [1.1, 0.7]
    for row in rows:
        with Image.open(contents[row[6]["path"]]) as picture:
            assert picture.size[1] == 130


@needs("swanlab")
def test_swanlab_has_every_number_once_over_a_resume_and_tables(folder: RunFolder) -> None:
    start_again("swanlab", folder)
    files = sorted((folder.trackers / "swanlab").glob("run-*/*.swanlab"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    table: dict[str, list[tuple[int, float]]] = {}
    for key, step, value in (entry for file in files for entry in tracker_files.swanlab_scalars(file)):
        if key.startswith("train/"):
            table.setdefault(key, []).append((step, value))
    wanted = expected_scalars(folder, float)
    assert table.keys() == wanted.keys()
    for key, points in wanted.items():
        assert [step for step, _ in table[key]] == [step for step, _ in points]
        np.testing.assert_allclose([value for _, value in table[key]], [value for _, value in points], rtol=1e-6)
    assert "num_generations" in (files[0].parent / "files" / "config.yaml").read_text()
    media = [path.parent / "media" for path in files]
    tables = sorted(table for folder in media for table in (folder / "echarts").iterdir())
    assert [table.name[:3] for table in tables] == ["001", "003", "006"]
    rows = json.loads(tables[1].read_text())["rowData"]
    assert len(rows) == 4 and "--x-x--0-0--{}--x-x--0-0--" in rows[0]["response"]
    assert (rows[0]["reward"], rows[0]["advantage"], rows[0]["answer"]) == ("1.1", "0.7", "B")
    assert len([path for path in media[0].rglob("*.png") if path.name.startswith("003-")]) == 2


@needs("mlflow")
def test_mlflow_has_every_number_once_over_a_resume_and_tables(folder: RunFolder) -> None:
    start_again("mlflow", folder)
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "proj"]
    (run,) = client.search_runs([experiment.experiment_id])
    table = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    points = {key: [(point.step, point.value) for point in history] for key, history in table.items()}
    assert points == expected_scalars(folder, float) and (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params["rollout.num_generations"] == "8"
    tables = [file.path for file in client.list_artifacts(run.info.run_id, "rollouts")]
    assert tables == ["rollouts/step-000001.json", "rollouts/step-000003.json", "rollouts/step-000006.json"]
    shown = json.loads(Path(client.download_artifacts(run.info.run_id, tables[0])).read_text())
    assert shown["columns"][-1] == "frames" and shown["data"][0][3].startswith("<script>")
    assert Path(client.download_artifacts(run.info.run_id, shown["data"][0][-1]["filepath"])).is_file()


@needs("mlflow")
def test_mlflow_keeps_numbers_once_that_are_given_again(folder: RunFolder) -> None:
    """Their answer may have been lost on its way back."""
    from mlflow import MlflowClient

    adapter = MlflowAdapter()
    adapter.start(TrackedRun(folder, "proj", "tiny", {}))
    for step in (1, 1, 2, 2):
        adapter.log_scalars(step, {"train/reward": 0.5})
        time.sleep(0.01)  # another time, which tells values apart
    adapter.finish(failed=False)
    history = MlflowClient().get_metric_history(adapter.run_id, "train/reward")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.5)]
