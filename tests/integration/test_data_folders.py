"""Whole runs on folders of a data set; media inside rows are refused before a model is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.data_sets import png, records, save_splits, shard
from tests.support.runs import read_lines
from tests.support.short_run import STEPS, short_run, train_here

pytestmark = pytest.mark.matrix


def test_a_run_on_shards_and_a_saved_folder(tmp_path: Path) -> None:
    shard(tmp_path / "sums", "train", records(6), 2)
    shard(tmp_path / "sums", "test", records(3, first=6), 1)
    save_splits(tmp_path / "saved", {"validation": records(3, first=6)})
    data = {
        "train": f"{tmp_path}/sums:train",
        "eval": {"shards": f"{tmp_path}/sums:test", "saved": f"{tmp_path}/saved"},
    }
    config = short_run(tmp_path, data=data)
    done = train_here(config)
    assert done.code == 0, done.printed
    assert f"data: 6 training questions from {tmp_path}/sums:train" in done.printed
    assert "after training, shards" in done.printed and "after training, saved" in done.printed
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [*range(1, STEPS + 1)]
    shard(tmp_path / "sums", "train", records(6, first=1), 2)
    done = train_here(config, f"training.steps={STEPS + 1}")
    assert done.code == 0 and "has another content than when the checkpoint was written" in done.printed


def test_media_inside_rows_are_refused_with_what_to_do(tmp_path: Path) -> None:
    inside = {"bytes": png(1), "path": "a.png"}
    rows = [record | {"data_type": "image", "image": inside} for record in records(3)]
    shard(tmp_path / "pictures", "train", rows, 1)
    config = short_run(tmp_path, data={"train": str(tmp_path / "pictures")})
    shutil.rmtree(tmp_path / "model")
    done = train_here(config)
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert "holds media inside its rows (image)" in done.printed and "Prepare it first" in done.printed
