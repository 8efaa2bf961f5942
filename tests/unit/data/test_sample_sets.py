"""Prepared sets are read back whole or refused; several sets are one sequence with ids of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from tests.support.data_sets import write_shards
from vlm_pg.data import prepared, sample_sets
from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.records import line_of_record, read_records, write_records
from vlm_pg.data.sample_sets import (
    Mixture,
    PreparedRecords,
    SeveralSets,
    any_media,
    first_of_each,
    open_records,
    open_training,
    order_of,
    refuse_empty,
    sources_of,
)
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.types import ANSWER_KINDS, MediaRef, Sample

MEDIA = (
    (),
    (MediaRef("video", "a.mp4", 1.5, 4.0, subtitles="a.srt"),),
    (MediaRef("image", "ü/b.jpg"), MediaRef("video", "c.mp4", times=(0.5, 2.0))),
    (MediaRef("video", "d.mp4"), MediaRef("video", "d.mp4", end=3.0), MediaRef("video", "frames/e", folder_fps=3.0)),
)


def make_samples(count: int, media: tuple[tuple[MediaRef, ...], ...] = MEDIA) -> list[Sample]:
    return [
        Sample(
            f"{number}-é",
            f"What is {number}?\nTell.",
            media[number % len(media)],
            ("A. x", "B. y"),
            "A",
            ANSWER_KINDS[number % len(ANSWER_KINDS)],
            ("star", "nextqa", "clevrer")[number % 3],
            "hard" if number % 2 else ("star", "nextqa", "clevrer")[number % 3],
            "<think>so</think>" if number % 5 else "",
        )
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SHARD_ROWS", 40)
    monkeypatch.setattr(prepared, "GROUP_ROWS", 8)


@pytest.mark.parametrize("count", [1, 40, 100])
def test_records_come_back_as_they_were(tmp_path: Path, count: int) -> None:
    samples = make_samples(count)
    files = write_shards(tmp_path, "train", samples)
    assert sum(files.values()) == count and len(files) == -(-count // 40)
    path = Path(f"{tmp_path}:train")
    opened, bad = open_records(path)
    assert isinstance(opened, PreparedRecords) and not bad
    assert list(opened) == samples == read_records(path)[0]
    positions = random.Random(0).choices(range(-count, count), k=50)
    assert [opened[position] for position in positions] == [samples[position] for position in positions]
    for part in (slice(3), slice(2, 30), slice(None, None, 7), slice(0, 0)):
        assert list(opened[part]) == samples[part]
    with pytest.raises(IndexError):
        opened[count]


def test_columns_are_read_without_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(90)
    write_shards(tmp_path, "train", samples)
    opened, _ = open_records(Path(f"{tmp_path}:train"))
    monkeypatch.setattr(sample_sets, "parse_record", None)
    names, positions = sources_of(opened)
    assert names == ["clevrer", "nextqa", "star"] and [names[position] for position in positions] == [
        s.source for s in samples
    ]
    few, listed = sources_of(opened[:50]), sources_of(samples[:50])
    assert few[0] == listed[0] and np.array_equal(few[1], listed[1])
    assert any_media(opened) and not any_media(opened[:1]) and any_media(opened[:2])


def test_datasets_reads_them(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", make_samples(50))
    table = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert (
        len(table) == 50 and table[1]["start"] == [1.5] and table.features["times"].feature.feature.dtype == "float64"
    )


def test_few_groups_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_sets, "_CACHED_GROUPS", 2)
    write_shards(tmp_path, "train", make_samples(100))
    opened, _ = open_records(Path(f"{tmp_path}:train"))
    reads: list[Any] = []
    read = sample_sets._read_group
    monkeypatch.setattr(sample_sets, "_read_group", lambda *group: reads.append(group) or read(*group))
    for position in (0, 7, 8, 3, 99, 8):
        opened[position]
    assert len(reads) == 4 and len(opened._cached) == 2  # type: ignore[attr-defined]


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    assert write_shards(tmp_path, "eval", []) == {"eval-00000-of-00001.parquet": 0}
    with pytest.raises(ConfigError, match="has no records in this split"):
        open_records(Path(f"{tmp_path}:eval"))


def test_other_files_are_read_at_once(tmp_path: Path) -> None:
    samples = make_samples(5)
    write_records(tmp_path / "a.jsonl", samples)
    assert open_records(tmp_path / "a.jsonl") == (samples, [])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([to_row(one) for one in samples]), tmp_path / "b.parquet")
    assert open_records(tmp_path / "b.parquet") == (samples, [])


@pytest.mark.parametrize("later", [5, None])
def test_another_version_is_refused(tmp_path: Path, later: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SCHEMA_VERSION", later)
    prepared.schema.cache_clear()
    write_shards(tmp_path, "train", make_samples(5))
    monkeypatch.undo()
    prepared.schema.cache_clear()
    with pytest.raises(ConfigError, match=rf"schema version {later}\. This program reads versions 1, 2, 3, 4\. Update"):
        open_records(Path(f"{tmp_path}:train"))


@pytest.mark.parametrize(
    ("version", "lacking"),
    [
        (1, ["details", "folder_fps", "turns", "rejected"]),
        (2, ["folder_fps", "turns", "rejected"]),
        (3, ["turns", "rejected"]),
    ],
)
def test_shards_of_earlier_versions_are_read(tmp_path: Path, version: int, lacking: list[str]) -> None:
    """They have no column of details, none of folders of pictures, or none of turns."""
    samples = make_samples(40, MEDIA[:3])
    table = pyarrow.Table.from_pylist([to_row(one) for one in samples], prepared.schema()).drop_columns(lacking)
    written = {b"vlm_pg.prepared": b'{"schema_version": %d}' % version, b"vlm_pg.rows": b"40"}
    first = {**prepared.schema().metadata, **written}
    first.pop(b"huggingface")
    pyarrow.parquet.write_table(table.replace_schema_metadata(first), tmp_path / "train-00000-of-00001.parquet")
    opened, bad = open_records(Path(f"{tmp_path}:train"))
    assert isinstance(opened, PreparedRecords) and list(opened) == samples and not bad


def test_damage_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    """One byte of one shard is changed, everywhere in turn: each record is as it was written, or refused."""
    samples = make_samples(40)
    write_shards(tmp_path, "train", samples)
    [path] = tmp_path.glob("*.parquet")
    whole = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(30):
        position = chance.randrange(len(whole))
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            opened, bad = open_records(path)
            assert list(opened) == samples and not bad
        except ConfigError:
            refused += 1
    assert refused > 15


def test_a_path_that_is_no_text_cannot_be_held(tmp_path: Path) -> None:
    [sample] = make_samples(1, ((MediaRef("video", "a\udcff.mp4"),),))
    with pytest.raises(SampleError, match=r"is not UTF-8\. Parquet holds UTF-8 alone"):
        ShardWriter(tmp_path, "train").add(to_row(sample))


@pytest.mark.parametrize(("start", "stop", "times"), [(0, 40, 2), (5, 5, 1)])
def test_a_shard_whose_rows_were_changed_is_read_like_any_file(
    tmp_path: Path, start: int, stop: int, times: int
) -> None:
    """Tools keep the metadata that say what it was: its rows are checked again, and ids used twice are found."""
    samples = make_samples(40)
    write_shards(tmp_path, "train", samples)
    [path] = tmp_path.glob("*.parquet")
    table = pyarrow.parquet.read_table(path)
    changed = pyarrow.concat_tables([table.slice(start, stop - start)] * times)
    assert b"vlm_pg.prepared" in changed.schema.metadata
    pyarrow.parquet.write_table(changed, tmp_path / "changed.parquet")
    if not changed.num_rows:
        with pytest.raises(ConfigError, match="has no records"):
            open_records(tmp_path / "changed.parquet")
        return
    opened, bad = open_records(tmp_path / "changed.parquet")
    assert opened == samples[start:stop]
    assert [one.reason for one in bad] == ["duplicate_id"] * (40 if times == 2 else 0)


# ---- several sets as one ----


def sample(name: str, source: str, media: tuple[MediaRef, ...] = ()) -> Sample:
    return Sample(name, f"Question {name}?", media, (), "5", "numerical", source, source)


TEXTS = [sample(str(position), "gsm8k" if position % 2 else "math") for position in range(5)]
CLIPS = [sample(str(position), "star", (MediaRef("video", f"{position}.mp4"),)) for position in range(3)]


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    """A file of texts and a prepared folder of clips; ids of both are 0, 1, ..."""
    (tmp_path / "texts.jsonl").write_bytes(b"".join(map(line_of_record, TEXTS)))
    (tmp_path / "clips").mkdir()
    write_shards(tmp_path / "clips", "train", CLIPS)
    return DataSettings(train={"words": tmp_path / "texts.jsonl", "clips": Path(f"{tmp_path}/clips:train")})


def test_sets_follow_each_other_by_name_with_ids_of_their_own(data: DataSettings) -> None:
    samples, bad = open_training(data)
    expected = [f"clips/{position}" for position in range(3)] + [f"words/{position}" for position in range(5)]
    assert not bad and [one.sample_id for one in samples] == expected
    assert [samples[position].sample_id for position in range(len(samples))] == expected
    assert [one.sample_id for one in samples[2:5]] == expected[2:5] and samples[-1].sample_id == "words/4"
    assert [one.dataset for one in samples] == ["clips"] * 3 + ["words"] * 5
    assert samples[0].media == CLIPS[0].media and samples[7].question == TEXTS[4].question
    with pytest.raises(IndexError):
        samples[8]
    reordered = DataSettings(train=dict(reversed(data.train_sets.items())))
    assert list(open_training(reordered)[0]) == list(samples)


def test_a_limit_is_of_each_set(data: DataSettings) -> None:
    few = first_of_each(open_training(data)[0], 2)
    assert [one.sample_id for one in few] == ["clips/0", "clips/1", "words/0", "words/1"]
    assert len(first_of_each(open_training(data)[0], None)) == 8
    assert first_of_each(TEXTS, 2) == TEXTS[:2]


def test_sets_are_the_sources(data: DataSettings) -> None:
    samples, _ = open_training(data)
    names, positions = sources_of(samples)
    assert names == ["clips", "words"] and positions.tolist() == [0] * 3 + [1] * 5 and positions.dtype == np.int32
    assert any_media(samples) and not any_media(SeveralSets({"words": TEXTS}))
    mixed = order_of(samples, {"clips": 1, "words": 0})
    assert isinstance(mixed, Mixture) and {mixed.index_at(position, 0, True) for position in range(99)} == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"data\.mixture has a weight for star"):
        order_of(samples, {"star": 1})


def test_bad_records_name_their_set(data: DataSettings, tmp_path: Path) -> None:
    with (tmp_path / "texts.jsonl").open("ab") as file:
        file.write(line_of_record(sample("0", "math")).replace(b'"5"', b'"many"'))
    samples, bad = open_training(data)
    assert len(samples) == 8 and [one.sample_id for one in bad] == ["words/0"] and "texts.jsonl:6" in bad[0].where


def test_a_set_without_a_record_is_named(data: DataSettings, tmp_path: Path) -> None:
    refuse_empty(open_training(data)[0], data, "")
    (tmp_path / "texts.jsonl").write_bytes(b'{"no": "record"}\n')
    with pytest.raises(ConfigError, match=r"texts.jsonl has no usable record \(look\).* set data.train.words to"):
        refuse_empty(open_training(data)[0], data, "look")


def test_roots_by_name() -> None:
    sets = {"a": Path("x/a.jsonl"), "b": Path("y/b.jsonl")}
    data = DataSettings(
        train=sets, eval={"c": Path("z/c.jsonl")}, media_root={"b": Path("/videos"), "c": Path("/more")}
    )
    assert [data.root_for(path, name) for name, path in data.train_sets.items()] == [Path("x"), Path("/videos")]
    assert data.root_for(Path("z/c.jsonl"), "c") == Path("/more") and not data.impossible()
    for_all = DataSettings(train=sets, media_root=Path("/all"))
    assert for_all.root_for(sets["a"], "a") == Path("/all")


def test_names_that_fit_nothing_are_refused() -> None:
    (wrong,) = DataSettings(train={"a": Path("a.jsonl")}, media_root={"b": Path("/videos")}).impossible()
    assert "data.media_root names 'b'" in wrong and "those are 'a'" in wrong
    (nameless,) = DataSettings(train=Path("a.jsonl"), media_root={"a": Path("/videos")}).impossible()
    assert "whose sets have no names" in nameless
    (empty,) = DataSettings(train={}).impossible()
    assert "data.train is empty" in empty
    for name in ("", "a/b", "a.b", "a b"):
        with pytest.raises(ValidationError):
            DataSettings(train={name: Path("a.jsonl")})
