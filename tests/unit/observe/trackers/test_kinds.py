"""A tracker that is named and not installed is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_pg.config import load_config
from vlm_pg.errors import ConfigError
from vlm_pg.observe.trackers import kinds
from vlm_pg.observe.trackers.kinds import KINDS, is_installed, refuse_missing
from vlm_pg.training.main import train

CONFIG = "model: {path: there/is/none}\ndata: {train: there/is/none.jsonl}\ntraining: {steps: 1}\n"


def test_what_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "is_installed", lambda module: module != "mlflow")
    refuse_missing(["tensorboard", "wandb", "swanlab"])
    with pytest.raises(ConfigError) as refused:
        refuse_missing(["tensorboard", "mlflow"])
    assert str(refused.value) == (
        "observe.trackers names mlflow, which is not installed. It is optional: install it with 'pip install "
        "mlflow-skinny sqlalchemy alembic', or set observe.trackers=[tensorboard]."
    )


@pytest.mark.parametrize("name", list(KINDS))
def test_a_run_says_so_before_it_reads_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "is_installed", lambda module: False)
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "run.yaml", [f"observe.trackers=[{name}]", f"run.dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match=f"observe.trackers names {name}, which is not installed"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_trackers_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tracker_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_tracker_folder") and not is_installed("no_such_tracker_package") and is_installed("yaml")
