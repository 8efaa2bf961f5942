"""What the run uses is checked; what it leaves out is counted and printed; what it refuses is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checking import Folder, about, record
from tests.support.data_sets import write_shards
from vlm_pg import cli
from vlm_pg.config import load_config
from vlm_pg.data.records import read_records
from vlm_pg.training.cache_fill import record_sets

LOST = {"missing_media": ["train.jsonl:3 3"]}


def written(folder: Folder, name: str, *records: dict[str, Any]) -> str:
    path = folder.path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


def used_by_the_run(folder: Folder) -> dict[str, list[str]]:
    """Sample ids for which a run fills its caches, by the path's stem."""
    config = load_config(folder.path / "run.yaml")
    return {one.path.stem: [sample.sample_id for sample in one.samples] for one in record_sets(config)}


def test_a_set_without_weight_is_neither_checked_nor_trained_on(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"a": written(folder, "a", record(1)), "b": written(folder, "b", about(1, "a.png"), about(2, "no.mov"))}
    held = [about(1, "b.png")]
    data: dict[str, Any] = {"train": sets, "mixture": {"a": 1, "b": 0}}
    assert folder.check((), held, data=data) == (0, {})
    out = capsys.readouterr().out
    assert "data.mixture: left out are the sets b" in out
    assert "0 records, 0 usable, 0 not; 0 media; 2 more are left out" in out
    assert used_by_the_run(folder) == {"a": ["1"], "held": ["1"]}
    found = folder.check((), held, data=data | {"mixture": {"a": 1, "b": 2}})[1]
    assert set(found) == {"missing_media", "media_trained_on"}


@pytest.mark.parametrize("form", ["jsonl", "shards"])
def test_a_source_without_weight_is_neither_checked_nor_trained_on(folder: Folder, form: str) -> None:
    records = [record(1), about(2, "a.png", data_source="other"), about(3, "no.mov", data_source="other"), record(4)]
    path = written(folder, "train", *records)
    if form == "shards":
        (folder.path / "shards").mkdir()
        write_shards(folder.path / "shards", "train", read_records(Path(path))[0])
        path = str(folder.path / "shards")
    data: dict[str, Any] = {"train": path, "media_root": str(folder.path)}
    weights = {"mixture": {"lamps": 1, "other": 0}}
    assert folder.check((), [about(1, "b.png")], data=data | weights) == (0, {})
    assert json.loads((folder.path / "out/check.json").read_text())["sets"]["data.train"]["left_out"] == 2
    assert next(iter(used_by_the_run(folder).values())) == ["1", "4"]
    assert set(folder.check((), [about(1, "b.png")], data=data)[1]) == {"missing_media", "media_trained_on"}
    # A limit counts the records of all sources, as in training, and weights are of the sources within it.
    assert folder.check((), (), data=data | weights | {"limit": 3}) == (0, {})
    assert next(iter(used_by_the_run(folder).values())) == ["1"]
    assert json.loads((folder.path / "out/check.json").read_text())["sets"]["data.train"]["left_out"] == 3


@pytest.mark.parametrize("several", [True, False])
def test_weights_that_training_refuses(folder: Folder, several: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(folder, "a", record(1))
    for weights, message in (
        ({"b": 1}, "has a weight for b"),
        ({"b": 1, "a" if several else "lamps": 1}, "has a weight for b"),
        ({"a" if several else "lamps": 0}, "are 0"),
    ):
        code, _ = folder.check((), (), data={"train": {"a": path} if several else path, "mixture": weights})
        assert code == 2 and message in capsys.readouterr().err


def test_evaluation_is_checked_as_it_is_chosen(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    train = written(folder, "train", about(1, "a.png"))
    held = written(folder, "held", record(1), about(2, "b.png"), {"problem_id": 3})
    other = written(folder, "other", about(1, "b.png"))
    data: dict[str, Any] = {"train": train, "eval": {"held": held, "other": other}}
    chosen = {"sets": ["held"], "limit": 1}
    assert folder.check((), (), data=data, eval=chosen) == (0, {})
    out = capsys.readouterr().out
    assert "eval.sets: left out are the evaluation sets other" in out and "data.eval.other" not in out
    assert "eval.limit: only the first 1 usable" in out and "; 2 more are left out" in out
    assert used_by_the_run(folder) == {"train": ["1"], "held": ["1"]}
    code, found = folder.check((), (), data=data)
    assert code == 1 and {reason: len(where) for reason, where in found.items()} == {
        "media_trained_on": 2,
        "missing_field": 1,
    }


def test_what_a_run_reads_beyond_its_limit(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there is checked; a file that breaks off, or has too many bad records, ends a run all the same."""
    records = [record(1), record(2), about(3, "no.mov"), {"problem_id": 4}]
    assert folder.check(records, data={"limit": 2}) == (0, {})
    assert "2 records, 2 usable, 0 not; 0 media; 2 more are left out" in capsys.readouterr().out
    bad = {"limit": 2, "max_bad_share": 0.2, "min_seen_for_bad_share": 4}
    assert folder.check(records, data=bad) == (1, {})
    out = capsys.readouterr().out
    assert "data.train: 1 of 4 records cannot be read, more than data.max_bad_share=0.2" in out
    assert "a run would end at once" in out
    assert folder.check(records, data=bad | {"min_seen_for_bad_share": 5})[0] == 0
    with (folder.path / "train.jsonl").open("a") as file:
        file.write('{"problem_id": ')
    assert cli.main(["check", str(folder.path / "run.yaml"), "data.limit=2"]) == 2


def test_the_sets_of_data_are_its_own(folder: Folder) -> None:
    """A file given instead of the sets is checked whole, whatever the configuration limits or leaves out."""
    folder.check([record(1), about(3, "no.mov"), about(2, "no.mov")], [record(1)], data={"limit": 1})
    words = [str(folder.path / "train.jsonl"), str(folder.path / "run.yaml"), "data.mixture={lamps: 0}", "eval.limit=1"]
    assert cli.main(["check", *words, "--out", str(folder.path / "out")]) == 1
    assert [len(where) for where in folder.found().values()] == [2]


def test_one_of_the_sets_has_its_media_where_they_are(folder: Folder) -> None:
    (folder.path / "records").mkdir()
    sets = {name: written(folder, f"records/{name}", about(1, "a.png")) for name in ("one", "two")}
    roots = {"one": str(folder.path), "held": str(folder.path)}
    code, found = folder.check((), (), data={"train": sets, "eval": {"held": sets["two"]}, "media_root": roots})
    assert code == 1 and set(found) == {"missing_media", "media_trained_on"}
    config = str(folder.path / "run.yaml")
    assert cli.main(["check", sets["one"], config]) == 0
    assert cli.main(["check", sets["one"], config, f"data.media_root={{two: {folder.path}, held: {folder.path}}}"]) == 1
