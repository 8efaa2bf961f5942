"""Several sets trained on as one sequence: whose samples come where, under which ids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.data_sets import write_shards
from vlm_pg.data.order import Mixture, order_of
from vlm_pg.data.records import line_of_record
from vlm_pg.data.sample_sets import SeveralSets, any_media, first_of_each, open_training, refuse_empty, sources_of
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError
from vlm_pg.types import MediaRef, Sample


def sample(name: str, source: str, media: tuple[MediaRef, ...] = ()) -> Sample:
    return Sample(name, f"Question {name}?", media, (), "5", "numerical", source, source)


TEXTS = [sample(str(place), "gsm8k" if place % 2 else "math") for place in range(5)]
CLIPS = [sample(str(place), "star", (MediaRef("video", f"{place}.mp4"),)) for place in range(3)]


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    """A file of texts and a prepared folder of clips; ids of both are 0, 1, ..."""
    (tmp_path / "texts.jsonl").write_bytes(b"".join(map(line_of_record, TEXTS)))
    (tmp_path / "clips").mkdir()
    write_shards(tmp_path / "clips", "train", CLIPS)
    return DataSettings(train={"words": tmp_path / "texts.jsonl", "clips": Path(f"{tmp_path}/clips:train")})


def test_sets_follow_each_other_by_name_with_ids_of_their_own(data: DataSettings) -> None:
    samples, bad = open_training(data)
    expected = [f"clips/{place}" for place in range(3)] + [f"words/{place}" for place in range(5)]
    assert not bad and [one.sample_id for one in samples] == expected
    assert [samples[place].sample_id for place in range(len(samples))] == expected
    assert [one.sample_id for one in samples[2:5]] == expected[2:5] and samples[-1].sample_id == "words/4"
    assert [one.dataset for one in samples] == ["clips"] * 3 + ["words"] * 5
    assert samples[0].media == CLIPS[0].media and samples[7].question == TEXTS[4].question
    with pytest.raises(IndexError):
        samples[8]


def test_order_of_the_settings_does_not_matter(data: DataSettings) -> None:
    turned = DataSettings(train=dict(reversed(data.train_sets.items())))
    assert list(open_training(turned)[0]) == list(open_training(data)[0])


def test_a_limit_is_of_each_set(data: DataSettings) -> None:
    few = first_of_each(open_training(data)[0], 2)
    assert [one.sample_id for one in few] == ["clips/0", "clips/1", "words/0", "words/1"]
    assert len(first_of_each(open_training(data)[0], None)) == 8
    assert first_of_each(TEXTS, 2) == TEXTS[:2]


def test_sets_are_the_sources(data: DataSettings) -> None:
    samples, _ = open_training(data)
    names, places = sources_of(samples)
    assert names == ["clips", "words"] and places.tolist() == [0] * 3 + [1] * 5 and places.dtype == np.int32
    assert any_media(samples) and not any_media(SeveralSets({"words": TEXTS}))
    mixed = order_of(samples, {"clips": 1, "words": 0})
    assert isinstance(mixed, Mixture) and {mixed.index_at(place, 0, True) for place in range(99)} == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"data\.mixture has a weight for star"):
        order_of(samples, {"star": 1})


def test_bad_records_say_whose_they_are(data: DataSettings, tmp_path: Path) -> None:
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
