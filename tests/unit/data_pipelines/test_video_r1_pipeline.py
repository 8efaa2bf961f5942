"""Video-R1 annotations to records: every record is kept, left out by a named filter, or refused with its reason."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import video_r1
from tests.support.tiny_media import write_media
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample


def record(problem_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "problem_id": problem_id,
        "problem": "What moves?",
        "data_type": "video",
        "problem_type": "multiple choice",
        "options": ["A. a car", "B. a dog"],
        "process": "",
        "solution": "<answer>B</answer>",
        "path": f"./clips/{problem_id}.mp4",
        "data_source": "made-up",
    } | changes


def kept(out: Path, split: str) -> list[Sample]:
    files = json.loads((out / "manifest.json").read_text())["files"]
    if not sum(count for name, count in files.items() if name.startswith(split)):
        return []
    return read_records(Path(f"{out}:{split}"))[0]


class Prepared:
    """A folder of small media of their own content and an annotation file; ``run`` prepares it and reads the result."""

    def __init__(self, root: Path):
        self.root, self.out = root, root / "out"
        (root / "media" / "clips").mkdir(parents=True)

    def run(self, records: Sequence[Mapping[str, Any]], *options: str) -> dict[str, Any]:
        for item in records:
            paths = item["path"] if isinstance(item["path"], list) else [item["path"]]
            for path in paths:
                if path and "gone" not in path:
                    write_media(self.root / "media" / path, zlib.crc32(path.encode()))
        annotations = self.root / "annotations.json"
        annotations.write_text(json.dumps(records))
        arguments = ["--train", str(annotations), "--media-root", str(self.root / "media"), *options]
        assert video_r1.main([*arguments, "--out", str(self.out)]) == 0
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return report

    def ids(self, name: str) -> set[str]:
        return {sample.sample_id for sample in kept(self.out, name)}


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return Prepared(tmp_path)


def test_filters_leave_out_by_name_and_before_any_check(prepared: Prepared) -> None:
    report = prepared.run(
        [
            record(1),
            record(2, data_type="image", path="./clips/gone.png"),
            record(3, problem_type="numerical", options=[], solution="<answer>many</answer>"),
            record(4, data_source="elsewhere", path="./clips/gone.mp4"),
            record(5, data_type="text", path=""),
        ],
        *("--data-types", "video", "--answer-kinds", "multiple_choice", "--sources", "made-up", "--eval-share", "0"),
    )
    assert prepared.ids("train") == {"1"} and report["refused"] == {}
    assert report["left_out"] == {
        "data type image": 1,
        "answer kind numerical": 1,
        "source elsewhere": 1,
        "data type text": 1,
    }


def test_a_gold_answer_that_cannot_earn_the_full_reward_is_refused(prepared: Prepared) -> None:
    bad = record(2, problem_type="numerical", options=[], solution="<answer>many</answer>")
    report = prepared.run([record(1), bad], "--eval-share", "0")
    assert report["refused"] == {"unscorable_gold_answer": 1} and prepared.ids("train") == {"1"}


def test_media_may_be_fetched_later(prepared: Prepared) -> None:
    missing = record(2, path="./clips/gone.mp4")
    assert prepared.run([record(1), missing], "--eval-share", "0")["refused"] == {"missing_media": 1}
    report = prepared.run([record(1), missing], "--eval-share", "0", "--skip-media-check", "--overwrite")
    assert report["refused"] == {} and prepared.ids("train") == {"1", "2"}


def test_no_media_are_in_both_files_and_the_share_is_about_right(prepared: Prepared) -> None:
    records = [record(number, path=f"./clips/{number % 200}.mp4") for number in range(600)]
    report = prepared.run(records, "--eval-share", "0.25")
    train, evaluation = (kept(prepared.out, name) for name in ("train", "eval"))
    assert len(train) + len(evaluation) == 600 and 90 < report["eval"] < 210
    assert not {sample.media for sample in train} & {sample.media for sample in evaluation}


def test_the_split_of_a_record_does_not_depend_on_the_others_but_on_the_seed(prepared: Prepared) -> None:
    records = [record(number) for number in range(60)]
    prepared.run(records, "--eval-share", "0.4")
    whole = prepared.ids("eval")
    prepared.run(records[:30], "--eval-share", "0.4", "--overwrite")
    assert prepared.ids("eval") == {sample_id for sample_id in whole if int(sample_id) < 30}
    prepared.run(records, "--eval-share", "0.4", "--seed", "1", "--overwrite")
    assert prepared.ids("eval") != whole


def test_a_record_whose_media_fall_on_both_sides_is_left_out_and_counted(prepared: Prepared) -> None:
    records = [record(number) for number in range(40)]
    prepared.run(records, "--eval-share", "0.5")
    train, evaluation = sorted(prepared.ids("train"))[0], sorted(prepared.ids("eval"))[0]
    both = record(99, path=[f"./clips/{train}.mp4", f"./clips/{evaluation}.mp4"])
    report = prepared.run([*records, both], "--eval-share", "0.5", "--overwrite")
    assert report["left_out"] == {"media in both files": 1}
    assert "99" not in prepared.ids("train") | prepared.ids("eval")


def test_a_changed_annotation_file_is_noticed(prepared: Prepared) -> None:
    prepared.run([record(1)], "--eval-share", "0")
    with pytest.raises(ConfigError, match=r"prepared with other arguments.*train_files.*bytes"):
        prepared.run([record(1), record(2)], "--eval-share", "0")


def test_a_second_start_does_nothing(prepared: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    prepared.run([record(1)], "--eval-share", "0")
    before = (prepared.out / "train-00000-of-00001.parquet").stat().st_mtime_ns
    arguments = ["--train", str(prepared.root / "annotations.json"), "--eval-share", "0"]
    video_r1.main([*arguments, "--media-root", str(prepared.root / "media"), "--out", str(prepared.out)])
    assert "already prepared" in capsys.readouterr().out
    assert (prepared.out / "train-00000-of-00001.parquet").stat().st_mtime_ns == before


def test_nothing_left_is_an_error_that_says_why(prepared: Prepared) -> None:
    with pytest.raises(ConfigError, match=r"No record is left for train") as error:
        prepared.run([record(1, path="./clips/gone.mp4")])
    assert "refused       1  missing_media" in str(error.value)
    assert not (prepared.out / "manifest.json").exists()


def test_missing_inputs_and_impossible_shares_are_refused(tmp_path: Path) -> None:
    annotations = tmp_path / "a.json"
    arguments = ["--train", str(annotations), "--out", str(tmp_path / "out"), "--media-root"]
    with pytest.raises(ConfigError, match=r"Data file .* does not exist. A file of records is expected"):
        video_r1.main([*arguments, str(tmp_path)])
    annotations.write_text("[]")
    with pytest.raises(ConfigError, match=r"has no rows"):
        video_r1.main([*arguments, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"Media root .* is not a folder.*Correct --media-root"):
        video_r1.main([*arguments, str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match=r"--eval-share is 1\.0.*less than 1.*Choose"):
        video_r1.main([*arguments, str(tmp_path), "--eval-share", "1"])
