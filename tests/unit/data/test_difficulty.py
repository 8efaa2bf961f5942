"""``data.difficulty``: which records train, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_sets import write_shards
from tests.unit.data.test_sample_sets import make_samples
from vlm_pg.config import config_of
from vlm_pg.data.difficulty import within_difficulty
from vlm_pg.data.digests import data_digests
from vlm_pg.data.sample_sets import (
    PreparedRecords,
    first_of_each,
    ids_of,
    media_of,
    open_training,
    order_of,
    sources_of,
)
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample

COUNT = 12
SAMPLES = make_samples(COUNT)
# By index: 0, 1/4, 1/2, 3/4, 1, none, 0, ...
VALUES = [(0.0, 0.25, 0.5, 0.75, 1.0, None)[index % 6] for index in range(COUNT)]


def data(folder: Path, values: Mapping[str, float | None] | None = None, **settings: Any) -> DataSettings:
    """A prepared set and its samples file."""
    if not (folder / "set").exists():
        (folder / "set").mkdir()
        write_shards(folder / "set", "train", SAMPLES)
    values = {one.sample_id: value for one, value in zip(SAMPLES, VALUES, strict=True)} if values is None else values
    rows = [{"problem_id": name, "p_correct": value, "responses": []} for name, value in values.items()]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"file": folder / "samples.jsonl", **settings.pop("difficulty", {})}
    return DataSettings(**({"train": f"{folder / 'set'}:train", "difficulty": own} | settings))


def indices(data: DataSettings, lines: list[str] | None = None) -> list[int]:
    samples = first_of_each(open_training(data)[0], data.limit)
    announce = (lambda line: None) if lines is None else lines.append
    found = within_difficulty(samples, data, announce)
    names = [one.sample_id for one in SAMPLES]
    return [names.index(one.sample_id.rpartition("/")[2]) for one in found]


def test_records_within_bounds_are_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    assert indices(data(tmp_path, difficulty={"low": 0.25, "high": 0.75}), lines) == [1, 2, 3, 7, 8, 9]
    assert lines == [
        "data.difficulty: 6 of 12 records have p_correct within [0.25, 0.75]; left out: 2 below, 2 above, 2 without a "
        "value, 0 without a row"
    ]
    assert indices(data(tmp_path, limit=4, difficulty={"high": 0.25})) == [0, 1]
    assert indices(DataSettings(train=f"{tmp_path / 'set'}:train")) == list(range(COUNT))


def test_prepared_records_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of training needs no record whole."""
    settings = data(tmp_path, difficulty={"low": 0.5})

    def read(self: PreparedRecords, index: int) -> Sample:
        raise AssertionError("a record was read")

    with monkeypatch.context() as patched:
        patched.setattr(PreparedRecords, "_sample", read)
        found = within_difficulty(open_training(settings)[0], settings)
        order = order_of(found, {"star": 1, "nextqa": 2, "clevrer": 0}, media_together=True)
        assert len(found) == 6 and len(order) < 6
    kept = [SAMPLES[index] for index in (2, 3, 4, 8, 9, 10)]
    assert list(found) == kept and list(ids_of(found)) == [one.sample_id for one in kept]
    names, sources_N = sources_of(found)
    assert [names[index] for index in sources_N] == [one.source for one in kept]
    assert list(found[1:4]) == kept[1:4] and found[-1] == kept[-1]
    for these, those in zip(media_of(found), media_of(kept), strict=True):
        assert (media_of(found) == these).tolist() == (media_of(kept) == those).tolist()


def test_missing_records(tmp_path: Path) -> None:
    values = {one.sample_id: 0.5 for one in SAMPLES[:10]}
    message = r"has no row of 2 of 12 training records \(the first is 10-é\).* Sample them .* data.difficulty.missing"
    with pytest.raises(ConfigError, match=message):
        indices(data(tmp_path, values))
    assert indices(data(tmp_path, values, difficulty={"missing": "keep"})) == list(range(COUNT))
    assert indices(data(tmp_path, values, difficulty={"missing": "drop"})) == list(range(10))
    # Sources without weight were not sampled, and are not missed. Sources by index: star, nextqa, clevrer, star, ...
    values = {one.sample_id: 0.5 for one in SAMPLES if one.source != "star"}
    kept = indices(data(tmp_path, values, mixture={"star": 0, "nextqa": 1, "clevrer": 1}))
    assert kept == list(range(COUNT))


def test_several_sets(tmp_path: Path) -> None:
    own = data(tmp_path)
    rows = [
        {"problem_id": one.sample_id, "dataset": name, "p_correct": value, "responses": []}
        for name, value in (("a", 0.5), ("b", 1.0))
        for one in SAMPLES
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert own.difficulty is not None
    train = {"a": own.train, "b": own.train}
    wide = DataSettings(train=train, difficulty=own.difficulty)
    assert indices(wide) == 2 * list(range(COUNT))
    narrow = own.difficulty.model_copy(update={"high": 0.5})
    with pytest.raises(
        ConfigError, match=r"data.difficulty keeps no record of b: none has p_correct within \[0, 0.5\]"
    ):
        indices(DataSettings(train=train, difficulty=narrow))
    assert len(indices(DataSettings(train=train, difficulty=narrow, mixture={"a": 1, "b": 0}))) == 2 * COUNT


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.difficulty keeps no record of .*set:train: none has p_correct within"):
        indices(data(tmp_path, difficulty={"low": 0.3, "high": 0.4}))
    with pytest.raises(ConfigError, match=r"none is not a file\. The samples.jsonl of a finished vlm-pg sample"):
        indices(data(tmp_path, difficulty={"file": tmp_path / "none"}))
    values = {"model": {"path": "m"}, "training": {"steps": 1}, "data": {"difficulty": {"file": "f", "low": 0.7}}}
    with pytest.raises(ConfigError, match=r"data.difficulty.low is 0.7, above data.difficulty.high=0.2, .* Exchange"):
        config_of(values, Path("c.yaml"), ["data.difficulty.high=0.2"])


def test_another_file_is_another_digest(tmp_path: Path) -> None:
    first = data_digests(data(tmp_path))["data.difficulty.file"]
    second = data_digests(data(tmp_path, {"x": 0.5}))["data.difficulty.file"]
    assert first["sha256"] != second["sha256"]
