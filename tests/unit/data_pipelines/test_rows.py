"""Media and subtitles inside rows become files below the media root: each once, named by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import gsm8k, video_r1
from data_pipelines.engine.command import prepare
from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.rows import MediaStore, Subtitles, as_vtt
from tests.support.clips import Clip, number_of, write
from tests.support.data_sets import png, records, save, save_splits, shard
from vlm_pg.data.records import read_records
from vlm_pg.data.tables import Embedded
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.paths import resolve
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import read_subtitles
from vlm_pg.types import Cue

JPEG, WEBP = b"\xff\xd8\xff\xe0" + b"j" * 60, b"RIFF\0\0\0\0WEBPVP8 " + b"w" * 60
MP4, WEBM = b"\0\0\0\x18ftypmp42" + b"m" * 60, b"\x1a\x45\xdf\xa3" + b"k" * 60


def name_of(data: bytes, suffix: str) -> str:
    digest = hashlib.sha256(data).hexdigest()[:40]
    return f"unpacked/{digest[:2]}/{digest}{suffix}"


@pytest.mark.parametrize(
    "data, suffix", [(png(1), ".png"), (JPEG, ".jpg"), (WEBP, ".webp"), (MP4, ".mp4"), (WEBM, ".mkv")]
)
def test_a_medium_is_written_under_its_content(data: bytes, suffix: str, tmp_path: Path) -> None:
    """Whatever the data set calls it: that may lead anywhere."""
    row = {"id": 3, "media": Embedded(data, "../../../etc/passwd\0.exe"), "list": [Embedded(data), "a.png", None]}
    wanted = name_of(data, suffix)
    assert MediaStore(tmp_path).unpack(row) == {"id": 3, "media": wanted, "list": [wanted, "a.png", None]}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / wanted]
    assert (tmp_path / wanted).read_bytes() == data


def test_a_file_that_is_there_is_left_and_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    store, path = MediaStore(tmp_path), tmp_path / name_of(png(1), ".png")
    store.unpack({"image": Embedded(png(1))})
    before = path.stat()
    store.unpack({"image": Embedded(png(1))})
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for damaged in (png(1)[:-9], b"\0" * len(png(1))):  # by a disk that was full, by a power cut
        path.write_bytes(damaged)
        store.unpack({"image": Embedded(png(1))})
        assert path.read_bytes() == png(1)


@pytest.mark.parametrize(
    "medium, message",
    [
        (Embedded(b"", None, "image"), r"'image' should hold image and it is empty\. JPEG, PNG, WebP and the"),
        (Embedded(b"GIF89a", None, None), r"should hold an image or video and it begins with b'GIF89a'"),
        (Embedded(b"#!/bin/sh\n", "a.png", "image"), r"should hold image and it begins with b'#!/bin/sh"),
        (Embedded(png(1), None, "video"), r"should hold video and it begins with b'\\x89PNG"),
        (Embedded(MP4, None, "image"), r"should hold image and it begins with b'"),
    ],
)
def test_a_medium_of_another_type_than_its_column_refuses_the_row(
    medium: Embedded, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SampleError, match=message) as refused:
        MediaStore(tmp_path).unpack({"image": [medium]})
    assert refused.value.reason == "unreadable_media" and list(tmp_path.iterdir()) == []


def test_names_of_columns_are_shown_without_control_characters(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"'a\\x1bb' should hold"):
        MediaStore(tmp_path).unpack({"a\x1bb": Embedded(b"")})


def test_an_unwritable_root_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "unpacked").write_text("a file in its place")
    with pytest.raises(
        ConfigError, match=r"cannot be written: Not a directory\. Media that stand inside rows are writt"
    ):
        MediaStore(tmp_path).unpack({"image": Embedded(png(1))})


@pytest.mark.parametrize(
    "codec, container",
    [("mpeg4", "mp4"), ("mpeg4", "mov"), ("mpeg4", "matroska"), ("mpeg4", "avi"), ("mpeg2video", "mpegts")]
    + [("mpeg2video", "vob"), ("libvpx", "webm"), ("flv", "flv"), ("wmv2", "asf")],
)
def test_every_container_gets_a_name_under_which_it_is_read(codec: str, container: str, tmp_path: Path) -> None:
    data = write(Clip(codec, container, "unpacked"), tmp_path).read_bytes()
    path = MediaStore(tmp_path).unpack({"video": Embedded(data, None, "video")})["video"]
    decoded = decode_video(tmp_path / path, MediaSettings(), 28)
    assert [number_of(frame.transpose(1, 2, 0)) for frame in decoded.frames][:1] == [0]


def picture(row: Row) -> dict[str, Any]:
    return {
        "problem": row["question"],
        "data_type": "image",
        "problem_type": "exact",
        "solution": f"<answer>{row['answer']}</answer>",
        "path": row["image"],
    }


PICTURES = DataSet("pictures", (Form("rows", {}, ("image", "question"), picture),), media=())
RECIPE = (f"{__name__}:PICTURES", ())


def picture_rows(count: int) -> list[dict[str, Any]]:
    """Two questions about each picture."""
    return [
        {"image": {"bytes": png(10 * (number // 2)), "path": "p.png"}, "question": f"Which? {number}", "answer": "red"}
        for number in range(count)
    ]


@pytest.mark.parametrize("layout", ["saved", "shards", "parquet"])
def test_a_published_set_with_pictures_inside_becomes_records_with_paths(layout: str, tmp_path: Path) -> None:
    import datasets

    text = datasets.Value("string")
    described = datasets.Features({"image": datasets.Image(), "question": text, "answer": text})
    rows = [*picture_rows(6), {"image": {"bytes": b"no picture", "path": None}, "question": "Which?", "answer": "red"}]
    if layout == "saved":
        save_splits(tmp_path / "pics", {"train": rows}, described)
        given, name, where = tmp_path / "pics:train", "pics-train", "data-00000-of-00001.arrow:7"
    else:
        shard(tmp_path / "pics", "train", rows, 1, described)
        given = tmp_path / "pics"
        name, where = "pics-train", "train-00000-of-00001.parquet:7"
        if layout == "parquet":
            given, name = next(given.iterdir()), "train-00000-of-00001"
    root = tmp_path / "root"
    root.mkdir()
    arguments = ["--train", str(given), "--eval-share", "0", "--media-root", str(root), "--out", str(tmp_path / "out")]
    assert prepare(PICTURES, "", arguments, RECIPE) == 0
    samples, bad = read_records(Path(f"{tmp_path}/out:train"))
    assert bad == [] and [sample.sample_id for sample in samples] == [f"{name}-{row}" for row in range(1, 7)]
    for number, sample in enumerate(samples):
        (ref,) = sample.media
        assert Path(resolve(ref, root)).read_bytes() == png(10 * (number // 2))
    assert len(list(root.rglob("*.png"))) == 3
    refused = (tmp_path / "out/refused.jsonl").read_text()
    assert '"unreadable_media"' in refused and where in refused and f"{name}-7" in refused
    assert prepare(PICTURES, "", arguments, RECIPE) == 0  # does nothing: it is there


def test_media_that_no_record_names_are_not_read(tmp_path: Path) -> None:
    """Previews beside the path of a record or in a row, of a kind that is not read, cost neither the row nor a file."""
    import datasets

    preview, text = {"bytes": b"GIF89a", "path": "a.gif"}, datasets.Value("string")
    plain = datasets.Dataset.from_list(records(4)).features
    described = datasets.Features(plain | {"preview": datasets.Image(), "options": datasets.List(text)})
    folder = save(tmp_path / "saved", [record | {"preview": preview} for record in records(4)], features=described)
    root = tmp_path / "root"
    root.mkdir()
    arguments = ["--media-root", str(root), "--eval-share", "0", "--out"]
    assert video_r1.main(["--train", str(folder), *arguments, str(tmp_path / "out")]) == 0
    assert len(read_records(Path(f"{tmp_path}/out:train"))[0]) == 4
    described = datasets.Features(
        {"image": datasets.Image(), "question": text, "answer": text} | {"gif": described["preview"]}
    )
    shard(tmp_path / "pics", "train", [row | {"gif": preview} for row in picture_rows(4)], 1, described)
    assert prepare(PICTURES, "", ["--train", str(tmp_path / "pics"), *arguments, str(tmp_path / "out-2")], RECIPE) == 0
    assert len(read_records(Path(f"{tmp_path}/out-2:train"))[0]) == 4
    assert [path.suffix for path in root.rglob("*") if path.is_file()] == [".png", ".png"]


def test_gsm8k_as_a_hub_has_it(tmp_path: Path) -> None:
    """Splits of a configuration's folder; questions of the evaluation split are left out of training."""
    rows = [{"question": f"How much is {number}?", "answer": f"It is {number}.\n#### {number}"} for number in range(5)]
    shard(tmp_path / "gsm8k/main", "train", rows, 2)
    shard(tmp_path / "gsm8k/main", "test", rows[3:4], 1)
    main = tmp_path / "gsm8k/main"
    arguments = ["--train", f"{main}:train", "--eval", f"{main}:test", "--out", str(tmp_path / "out")]
    assert gsm8k.main(arguments) == 0
    train, test = (read_records(Path(f"{tmp_path}/out:{name}"))[0] for name in ("train", "eval"))
    assert [sample.sample_id for sample in train] == [f"main-train-{row}" for row in (1, 2, 3, 5)]
    assert [(sample.sample_id, sample.answer) for sample in test] == [("main-test-1", "3")]
    assert gsm8k.main(arguments) == 0
    shard(main, "test", rows[4:5], 1)
    with pytest.raises(ConfigError, match="was prepared with other arguments"):
        gsm8k.main(arguments)
    with pytest.raises(ConfigError, match=r"has the splits .*\. One of them is expected"):
        gsm8k.main(["--train", str(main), "--out", str(tmp_path / "other")])


TEXTS = [
    "Mind the gap.",
    "a <b>bold</b> claim & <more>",
    "&lt;i&gt; is written so",
    "1984",
    "WEBVTT",
    "NOTE that",
    "00:00:01.000 --> 00:00:02.000",
    "we meet 10:30 -> 11:00",
    "10: 30 → 11 :45",
    "00:00:01,000 00:00:02,000",
    "<v Roger>hello",
]


def test_a_file_holds_times_in_milliseconds_and_escaped_texts() -> None:
    written = as_vtt([Cue(0.0, 1.5, "one\n two"), Cue(3661.0625, 3661.25, "a < b at 10:30")])
    assert written == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none two\n\n01:01:01.062 --> 01:01:01.250\na &lt; b at 10&#58;30\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_it_is(text: str, tmp_path: Path) -> None:
    path = MediaStore(tmp_path).write_subtitles(Subtitles((Cue(1.0, 2.0, text), Cue(2.0, 2.5, "end"))))
    assert path is not None and path.startswith("unpacked/") and path.endswith(".vtt")
    cues = read_subtitles(str(tmp_path / path), path, MediaSettings())
    assert cues == (Cue(1.0, 2.0, text), Cue(2.0, 2.5, "end"))


@pytest.mark.parametrize("texts", [(), ("", " \n ")])
def test_empty_subtitles_write_no_file(texts: tuple[str, ...], tmp_path: Path) -> None:
    subtitles = Subtitles(tuple(Cue(1.0, 2.0, text) for text in texts))
    assert MediaStore(tmp_path).write_subtitles(subtitles) is None and not list(tmp_path.iterdir())


def test_half_of_a_sign_does_not_keep_the_rest_from_being_written(tmp_path: Path) -> None:
    path = MediaStore(tmp_path).write_subtitles(Subtitles((Cue(1.0, 2.0, "so \ud83d it ends"),)))
    assert read_subtitles(str(tmp_path / str(path)), "it", MediaSettings()) == (Cue(1.0, 2.0, "so ? it ends"),)
