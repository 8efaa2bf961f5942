"""A folder of a data set gives the rows of a file, each with its location; nothing outside of it is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.data_sets import records, save, save_splits, shard
from tests.support.processes import ROOT
from vlm_pg.data.digests import changed_data, data_digests
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordLocation, data_folder, files_of, read_raw, root_of
from vlm_pg.data.records import read_records
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError

ROWS = records(7)


def saved(folder: Path) -> Path:
    return save(folder, ROWS, shards=3)


def splits(folder: Path) -> Path:
    save_splits(folder, {"train": ROWS, "test": records(2, first=90)})
    return Path(f"{folder}:train")


def shards(folder: Path) -> Path:
    shard(folder, "train", ROWS, 3)
    shard(folder, "test", records(2, first=90), 1)
    return Path(f"{folder}:train")


def hub(folder: Path) -> Path:
    shard(folder / "data", "train", ROWS, 3)
    return folder


LAYOUTS = [saved, splits, shards, hub]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_rows_in_order(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    path = layout(tmp_path / "sums")
    assert [record for _, record in read_raw(path)] == ROWS
    samples, bad = read_records(path)
    (tmp_path / "records.json").write_text(json.dumps(ROWS))
    assert samples == read_records(tmp_path / "records.json")[0] and bad == []


def test_a_location_has_file_and_row_and_numbers_all_rows(tmp_path: Path) -> None:
    found = [(location.within(Path("x")), location.key) for location, _ in read_raw(shards(tmp_path / "sums"))]
    assert found == [
        ("train-00000-of-00003.parquet:1", "1"),
        ("train-00000-of-00003.parquet:2", "2"),
        ("train-00000-of-00003.parquet:3", "3"),
        ("train-00001-of-00003.parquet:1", "4"),
        ("train-00001-of-00003.parquet:2", "5"),
        ("train-00002-of-00003.parquet:1", "6"),
        ("train-00002-of-00003.parquet:2", "7"),
    ]
    samples, _ = read_records(tmp_path / "sums:test")
    assert samples[1].where == "test-00000-of-00001.parquet:2"
    assert RecordLocation(3).within(Path("a/b.jsonl")) == "b.jsonl:3" and RecordLocation(1, 5).key == "1.5"


def test_shards_of_other_names_and_numbers(tmp_path: Path) -> None:
    """More than ten, and the names of an earlier convention, which end in a hash."""
    folder = shard(tmp_path / "sums", "validation.matched", records(24), 12)
    for path in folder.iterdir():
        path.rename(path.with_name(f"{path.stem}-0123456789abcdef.parquet"))
    assert [record["problem_id"] for _, record in read_raw(folder)] == list(range(24))
    found = data_folder(folder)
    assert found is not None and (found.split, found.name) == ("validation.matched", "sums-validation.matched")


def test_where_records_lie_and_what_they_consist_of(tmp_path: Path) -> None:
    path = splits(tmp_path / "sums")
    assert root_of(path) == tmp_path / "sums" and DataSettings().root_for(path) == tmp_path / "sums"
    assert DataSettings().root_for(tmp_path / "a.jsonl") == tmp_path
    assert files_of(path) == (tmp_path / "sums/train/data-00000-of-00001.arrow",)
    assert files_of(Path("a.jsonl")) == (Path("a.jsonl"),)


def test_another_content_of_any_file_is_noticed_after_a_resume(tmp_path: Path) -> None:
    settings = DataSettings(train=shards(tmp_path / "sums"))
    before = data_digests(settings)
    assert changed_data(before, data_digests(settings)) == [] and len(before["data.train"]["sha256"]) == 64
    shard(tmp_path / "sums", "train", records(7, first=1), 3)
    assert "has another content than when the checkpoint was written" in changed_data(before, data_digests(settings))[0]


def test_a_folder_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    """The first rank alone would end here, and the others wait for it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_text("{}")
    settings = DataSettings(train=tmp_path / "a.jsonl", eval={"one": tmp_path / "empty", "two": tmp_path / "gone"})
    assert list(data_digests(settings)) == ["data.train"]


def test_a_large_number_in_the_name_of_a_shard_costs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-05000000.parquet").write_bytes(b"")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"has 1 of the 5000000 shards of 'train' only"):
            data_folder(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_a_link_to_a_folder_is_named_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path / "0123abcd", "train", ROWS, 1)
    (tmp_path / "sums").symlink_to("0123abcd")
    monkeypatch.chdir(tmp_path / "sums")
    for path, name in ((tmp_path / "sums", "sums-train"), (Path("../sums/."), "sums-train")):
        found = data_folder(path)
        assert found is not None and found.name == name


def test_a_name_with_a_colon_that_exists_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a:b.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(read_records(tmp_path / "a:b.jsonl")[0]) == 1
    save(tmp_path / "sums", records(1))
    save(tmp_path / "sums:train", ROWS)
    assert len(read_records(tmp_path / "sums:train")[0]) == 7


def change(folder: Path, what: str) -> None:
    """A folder that is wrong in one way."""
    train = folder / "train"
    match what:
        case "no files" | "outside" | "no json" | "missing":
            names = {"outside": ["../test/data-00000-of-00001.arrow"], "missing": ["gone\x1b.arrow"]}
            state = json.dumps({"_data_files": [{"filename": name} for name in names.get(what, [])]})
            (train / "state.json").write_text("{" if what == "no json" else state)
        case "split outside":
            (folder / "dict").mkdir()
            (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["../train"]}')
        case "shard gone":
            shard(folder / "shards", "train", ROWS, 3)
            (folder / "shards" / "train-00001-of-00003.parquet").unlink()
        case "two divisions":
            shard(folder / "shards", "train", ROWS, 3)
            shard(folder / "shards", "train", ROWS, 2)
        case "shard twice":
            shard(folder / "shards", "train", ROWS, 1)
            data = (folder / "shards/train-00000-of-00001.parquet").read_bytes()
            (folder / "shards/train-00000-of-00001-0123456789abcdef.parquet").write_bytes(data)
        case "indices":
            state = json.loads((train / "state.json").read_text()) | {"_indices_data_files": [{"filename": "i.arrow"}]}
            (train / "state.json").write_text(json.dumps(state))
        case "inner":
            shard(folder / "hub" / "main", "train", ROWS, 1)


@pytest.fixture(scope="module")
def two_splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splits(tmp_path_factory.mktemp("made") / "sums", {"train": ROWS, "test": ROWS})


WRONG = [
    ("", ":dev", r"has the splits train, test, not 'dev'\. One of them is expected\. Correct the name after the colon"),
    ("", "", r"has the splits train, test\. One of them is expected\. Name it: .*sums:SPLIT"),
    ("", "/train:dev", r"has one split, without a name, not 'dev'"),
    ("no files", ":train", r"has a state\.json that lists no files of it\. Names of files are expected"),
    ("no json", ":train", r"has a state\.json that lists no files of it"),
    ("outside", ":train", r"has a state\.json that lists no files of it"),
    ("missing", ":train", r"lacks gone\\x1b\.arrow\. All files in state\.json are needed\. Copy it again"),
    ("split outside", "/dict", r"has a dataset_dict\.json that lists no splits"),
    ("shard gone", "/shards", r"has 2 of the 3 shards of 'train' only\. All are expected\. Download the others"),
    ("two divisions", "/shards", r"has shards of 'train' of two divisions"),
    ("shard twice", "/shards", r"has shard 0 twice: train-00000-of-00001-0123456789abcdef\.parquet, train-00000-of"),
    ("indices", ":train", r"was saved by an early version of datasets with a list of the rows that count .* newer one"),
    (
        "inner",
        "/hub",
        r"holds no data set itself; its folders main do\. What datasets saves to disk, or Parquet shards",
    ),
    ("", "/train/nothing", r"There is no data file .*/train/nothing'\. Give a \.json, \.jsonl or \.parquet file"),
]


@pytest.mark.parametrize("what, suffix, message", WRONG, ids=[f"{what}{suffix}" for what, suffix, _ in WRONG])
def test_what_is_no_data_set_is_refused_in_words(
    what: str, suffix: str, message: str, two_splits: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_splits, tmp_path / "sums")
    change(tmp_path / "sums", what)
    with pytest.raises(ConfigError, match=message) as refused:
        read_records(Path(f"{tmp_path}/sums{suffix}"))
    assert str(refused.value).isprintable()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no data set\. What datasets saves to disk, or Parquet shards such"):
        read_records(tmp_path)


def test_a_value_of_an_arrow_file_that_cannot_be_read_costs_its_record_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "sums", ROWS)
    (file,) = folder.glob("*.arrow")
    data = file.read_bytes()
    assert data.count(b"How much is 3 + 3?") == 1
    file.write_bytes(data.replace(b"How much is 3 + 3?", b"How much is 3 \xff 3?"))
    found = [record for _, record in read_raw(folder)]
    assert found[3]["problem"] == Unreadable("a string that cannot be read (ArrowInvalid)")
    assert found[:3] == ROWS[:3] and found[4:] == ROWS[4:]
    samples, bad = read_records(folder)
    assert len(samples) == 6 and [(one.reason, one.where) for one in bad] == [
        ("unreadable_value", "data-00000-of-00001.arrow:4")
    ]


def test_an_arrow_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "sums", ROWS)
    (file,) = folder.glob("*.arrow")
    data = file.read_bytes()
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    for cut in (data[:-700], data[:-8], data + b"\0" * 8):
        file.write_bytes(cut)
        with pytest.raises(ConfigError, match=r"arrow' cannot be read as Arrow: .* A complete Arrow file is expected"):
            read_records(folder)


WATCHED = """
import os, sys
from pathlib import Path
from vlm_pg.data.records import read_records
from vlm_pg.data.files import read_raw
logged = []
def note(event, arguments):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        logged.append((event, arguments))
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]) and not str(arguments[0]).endswith(".json"):
        logged.append((event, arguments))
import datasets  # what the package does when it is imported is not the data set's doing
sys.addaudithook(note)
for path in sys.argv[2:]:
    assert sum(1 for _ in read_raw(Path(path))) == 7, path
assert "loading_script" not in sys.modules and not logged, logged
"""


def test_no_code_of_a_data_set_runs_and_nothing_is_looked_up_elsewhere(tmp_path: Path) -> None:
    """Loading scripts, links to other hosts and a cache are what ``load_dataset`` would go by."""
    paths = [str(layout(tmp_path / layout.__name__)) for layout in LAYOUTS]
    home = tmp_path / "home"
    home.mkdir()
    for path in paths:
        folder = Path(path.removesuffix(":train"))
        for name in (folder.name, "dataset", "loading_script", "sitecustomize"):
            (folder / f"{name}.py").write_text("raise SystemExit('code of the data set was run')\n")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files: https://127.0.0.1/a\n---\n"
        )
    environment = os.environ | {"HOME": str(home), "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WATCHED, str(tmp_path), *paths]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_records_without_media_need_no_datasets(tmp_path: Path) -> None:
    """It takes seconds to import."""
    path = shards(tmp_path / "sums")
    code = "import sys; from pathlib import Path; from vlm_pg.data.records import read_records\n"
    code += "assert len(read_records(Path(sys.argv[1]))[0]) == 7 and 'datasets' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
