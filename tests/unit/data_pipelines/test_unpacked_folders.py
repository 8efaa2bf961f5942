"""``vlm-pg prepare NAME FOLDER`` on folders as data sets unpack: it finds files and media and keeps what is good."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.support.tiny_media import mp4, write_media
from tests.unit.data_pipelines import (
    test_clevrer,
    test_geometry3k,
    test_llava_video_178k,
    test_longvideo_reason,
    test_mathvista,
    test_nextqa,
    test_perception_test,
    test_star,
    test_vsi,
)
from vlm_pg.cli_prepare import find_pipelines, prepare
from vlm_pg.data.prepared_reader import open_records
from vlm_pg.types import Sample


@dataclass
class Unpacked:
    """A data set laid out: what stays of it, answers by id, and what is refused."""

    lay_out: Callable[[Path], None]
    train: dict[str, str] = field(default_factory=dict)
    evaluation: dict[str, str] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def dump(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = isinstance(content, list) and path.suffix == ".jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in content) if lines else json.dumps(content))


def media(folder: Path, *names: str) -> None:
    """Each of its own content: one that two splits share would leave the question out of training."""
    for name in names:
        write_media(folder / name, zlib.crc32(name.encode()))


def shard(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def jpeg() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(content, "JPEG")
    return content.getvalue()


def star(folder: Path) -> None:
    row = {"question": "Which?", "video_id": "47U0Y", "start": 1.5, "end": 9.0, "answer": "The bag."}
    row |= {"choices": test_star.choices("The door.", "The bag.")}
    dump(folder / "STAR_train.json", [row | {"question_id": "Interaction_T1_13"}])
    gone = row | {"question_id": "Sequence_T2_2", "video_id": "GONE1"}
    dump(folder / "STAR_val.json", [row | {"question_id": "Sequence_T1_1", "video_id": "6H78U"}, gone])
    media(folder, "Charades_v1_480/47U0Y.mp4", "Charades_v1_480/6H78U.mp4")


def charades_sta(folder: Path) -> None:
    for split, video in (("train", "3MSZA"), ("test", "0A8CF")):
        (folder / f"charades_sta_{split}.txt").write_text(f"{video} 1.0 4.5##a {split}.\n")
        media(folder, f"Charades_v1_480/{video}.mp4")


def clevrer(folder: Path) -> None:
    for split, index in (("train", 428), ("validation", 10_000)):
        questions = test_clevrer.descriptive(0, "yes"), test_clevrer.of_choices(1, "correct", "wrong", "correct")
        scene = test_clevrer.scene(index, *questions)
        dump(folder / f"{split}.json", [scene])
        media(folder, f"video_{split}/video_00000-20000/{scene['video_filename']}")


def perception_test(folder: Path) -> None:
    for split, name in (("train", "video_7"), ("valid", "video_8")):
        question = test_perception_test.question(2)
        dump(folder / f"mc_question_{split}.json", test_perception_test.video_of(name, question))
        dump(folder / f"cut_frame_mapping_{split}.json", {name: 150})
        media(folder, f"videos/{name}.mp4")


def nextqa(folder: Path) -> None:
    for split, video in (("train", 17), ("val", 18)):
        test_nextqa.csv_of(folder, test_nextqa.row(video)).rename(folder / f"{split}.csv.new")
    for split in ("train", "val"):
        (folder / f"{split}.csv.new").rename(folder / f"{split}.csv")
    dump(folder / "map_vid_vidorID.json", {"17": "0101/17", "18": "0102/18"})
    media(folder, "NExTVideo/0101/17.mp4", "NExTVideo/0102/18.mp4")


def llava(folder: Path) -> None:
    """Its videos still in their archive."""
    inside = test_llava_video_178k.SUBSET
    dump(folder / inside / f"{test_llava_video_178k.MC}.json", [test_llava_video_178k.PUBLISHED])
    with tarfile.open(folder / inside / f"{inside}_videos_1.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo(test_llava_video_178k.VIDEO)
        entry.size = len(mp4())
        archive.addfile(entry, io.BytesIO(mp4()))


def longvideo(folder: Path) -> None:
    row = test_longvideo_reason.row
    dump(folder / "train.jsonl", [row(), row(test_longvideo_reason.DAMAGED, "<answer>B</answer>")])
    dump(folder / "test.jsonl", [row(videos="longvila_videos/other.webm")])
    media(folder, "longvila_videos/5nKz1hzvSqs.mp4", "longvideo_eval_subset1/other.webm")


def vsi(folder: Path) -> None:
    dump(folder / "vsi_590k.jsonl", [test_vsi.COUNT | {"video": "scannet/1.mp4"}, test_vsi.ANGLE])
    media(folder, "scannet/1.mp4", "s3dis/1.jpg")


def geometry3k(folder: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        dump(folder / split / f"{number}" / "data.json", test_geometry3k.DATA | {"id": number})
        (folder / split / f"{number}" / "img_diagram.png").write_bytes(test_geometry3k.png(number))


def geometry3k_shards(folder: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        image = {"bytes": test_geometry3k.png(number), "path": None}
        row = test_geometry3k.ROW | {"id": number, "images": [image], "ground_truth": "B"}
        shard(folder / f"{split}-00000-of-00001.parquet", [row])


def mathvista(folder: Path) -> None:
    dump(folder / "testmini.json", {"7": test_mathvista.FLOAT | {"pid": "7", "image": "images/7.jpg"}})
    (folder / "images").mkdir()
    (folder / "images/7.jpg").write_bytes(jpeg())


def math(folder: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        row = {"problem": f"{number} + 1?", "level": "Level 1", "type": "Algebra"}
        row["solution"] = f"\\boxed{{{number + 1}}}"
        dump(folder / "MATH" / split / "algebra" / f"{number}.json", row)


def gsm8k(folder: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        rows = [{"question": f"How much is {number}?", "answer": f"It is.\n#### {number}"}]
        shard(folder / "main" / f"{split}-00000-of-00001.parquet", rows)


def video_r1(folder: Path) -> None:
    row = {"problem": "What moves?", "data_type": "video", "problem_type": "free-form", "options": [], "process": ""}
    rows = [row | {"problem_id": n, "solution": "<answer>a car</answer>", "path": f"./STAR/{n}.mp4"} for n in range(3)]
    dump(folder / "Video-R1-260k.json", rows)
    media(folder, *(f"STAR/{n}.mp4" for n in range(2)))


LLAVA = f"{test_llava_video_178k.MC}-1"
ROOT = r"5 \sqrt { 2 }"
NO_SHARE = ("--eval-share", "0")
FOLDERS = {
    "star": Unpacked(star, {"Interaction_T1_13": "B"}, {"Sequence_T1_1": "B"}, {"missing_media": 1}),
    "charades_sta": Unpacked(charades_sta, {"charades_sta_train-1": "[1, 4.5]"}, {"charades_sta_test-1": "[1, 4.5]"}),
    "clevrer": Unpacked(
        clevrer,
        {"video_00428_0": "yes", "video_00428_1": "A, C"},
        {"video_10000_0": "yes", "video_10000_1": "A, C"},
    ),
    "perception_test": Unpacked(perception_test, {"video_7_2": "B"}, {"video_8_2": "B"}),
    "nextqa": Unpacked(nextqa, {"17_3": "C"}, {"18_3": "C"}),
    "llava_video_178k": Unpacked(llava, {f"{LLAVA}-1": "A", f"{LLAVA}-2": "A"}, options=("--unpack", *NO_SHARE)),
    "longvideo_reason": Unpacked(longvideo, {"train-1": "A"}, {"test-1": "A"}, {"bad_options": 1}),
    "vsi": Unpacked(vsi, {"vsi_590k-1": "4", "vsi_590k-2": "240.0"}, options=NO_SHARE),
    "geometry3k": Unpacked(geometry3k, {"1": "B"}, {"2": "B"}),
    "geometry3k, Parquet": Unpacked(geometry3k_shards, {"1": ROOT}, {"2": ROOT}),
    "mathvista": Unpacked(mathvista, evaluation={"7": "1.2"}),
    "math": Unpacked(math, {"train/algebra/1.json": "2"}, {"test/algebra/2.json": "3"}),
    "gsm8k": Unpacked(gsm8k, {"main-train-1": "1"}, {"main-test-1": "2"}),
    "video_r1": Unpacked(video_r1, {"0": "a car", "1": "a car"}, {}, {"missing_media": 1}, NO_SHARE),
}


def test_every_published_data_set_is_here() -> None:
    assert {name.partition(",")[0] for name in FOLDERS} == set(find_pipelines()) - {"embedded", "generic"}


def samples(out: Path, split: str) -> list[Sample]:
    files = json.loads((out / "manifest.json").read_text())["files"]
    found = sum(count for name, count in files.items() if name.startswith(split))
    return list(open_records(Path(f"{out}:{split}"))[0]) if found else []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_becomes_a_prepared_set(name: str, tmp_path: Path) -> None:
    unpacked, folder, out = FOLDERS[name], tmp_path / "raw", tmp_path / "out"
    folder.mkdir()
    unpacked.lay_out(folder)
    assert prepare(name.partition(",")[0], [str(folder), "--out", str(out), *unpacked.options]) == 0
    for split, expected in (("train", unpacked.train), ("eval", unpacked.evaluation)):
        found = samples(out, split)
        assert {one.sample_id: one.answer for one in found} == expected
        assert all((folder / ref.path).is_file() for one in found for ref in one.media)
    assert json.loads((out / "report.json").read_text())["refused"] == unpacked.refused
    assert (out / "summary.html").is_file() and not (out / ".parts").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(name.partition(",")[0], [str(folder), "--out", str(out), *unpacked.options]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
