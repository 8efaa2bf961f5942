"""Splits share no medium and no question in any spelling; duplicates are reported; filters leave records out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import gsm8k, video_r1
from data_pipelines.engine.judging import split_keys
from data_pipelines.engine.resume import Verdict
from data_pipelines.engine.splits import Assigned, Repeats, Splitter
from tests.support.pipeline_rows import write_lines
from tests.support.tiny_media import write_media
from vlm_pg.check.records import question_key
from vlm_pg.data.dedup import Ledger, path_key, text_key
from vlm_pg.data.records import read_records
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.types import BadSample, MediaRef, Sample

TEXT = "What is the café?\nTwo lines."
SPELLINGS = [
    TEXT,
    f" {TEXT} ",
    TEXT.replace("\n", "\r\n"),
    TEXT.replace("\n", " "),
    TEXT.replace(" ", "\u00a0\t"),
    TEXT.replace("é", "e\u0301"),
]
OTHERS = ["What is the cafe?\nTwo lines.", "what is the café?\nTwo lines.", "What is the café? Two lines", "Two lines."]
PATH = "b/café.mp4"
PATHS = [
    PATH,
    f"./{PATH}",
    f"././{PATH}",
    "b//café.mp4",
    "x/../b/café.mp4",
    "b\\café.mp4",
    f" {PATH}",
    "b/cafe\u0301.mp4",
]
OTHER_PATHS = ["café.mp4", "c/café.mp4", "../b/café.mp4", "b/café.MP4", "https://host/b/café.mp4"]


def asks(question: str, *paths: str, number: int = 1) -> Sample:
    media = tuple(MediaRef("video", path) for path in paths)
    return Sample(str(number), question, media, ("A. the café", "B. y"), "A", "multiple_choice", "s", "s")


def test_the_same_pictures_at_another_speed_are_another_question() -> None:
    first, second = (replace(asks(TEXT), media=(MediaRef("video", "a", folder_fps=fps),)) for fps in (3.0, 6.0))
    facts = [MediaFacts("0", 1.0, 2, 28, 28, 1)]
    assert question_key(first, facts) != question_key(second, facts) == question_key(second, facts)
    with Ledger() as ledger:
        repeats = Repeats(ledger)
        assert [repeats.of(one, facts) is None for one in (first, second, first)] == [True, True, False]


@pytest.mark.parametrize("spelled", [*SPELLINGS, *OTHERS])
def test_questions(spelled: str) -> None:
    first, second = asks(TEXT), asks(spelled)
    same = spelled in SPELLINGS
    assert (split_keys(first) == split_keys(second)) is same
    assert (question_key(first, []) == question_key(second, [])) is same
    with Ledger() as ledger:
        repeats = Repeats(ledger)
        assert repeats.of(first, []) is None
        assert (repeats.of(replace(second, sample_id="2"), []) is not None) is same


@pytest.mark.parametrize("spelled", [*PATHS, *OTHER_PATHS])
def test_paths(spelled: str) -> None:
    first, second = asks("q", PATH), asks("q", spelled, number=2)
    same = spelled in PATHS
    assert (split_keys(first) == split_keys(second)) is same
    with Ledger() as ledger:
        splitter, repeats = Splitter(ledger, 0.0, 0), Repeats(ledger)
        splitter.note([Verdict("eval", first, keys=split_keys(first))])
        (placed,) = splitter.assign([Verdict("train", second, keys=split_keys(second))])
        assert placed == "also in the evaluation file" if same else isinstance(placed, Assigned)
        assert repeats.of(first, []) is None and (repeats.of(second, []) is not None) is same


def test_the_options_of_a_question_too() -> None:
    other = replace(asks(TEXT, number=2), options=("A. the  cafe\u0301", "B. y"))
    with Ledger() as ledger:
        repeats = Repeats(ledger)
        assert repeats.of(asks(TEXT), []) is None and repeats.of(other, []) is not None


def test_addresses_and_odd_names_have_keys() -> None:
    assert path_key("https://host/a//b/../c?d=x/..//y") == "https://host/a//b/../c?d=x/..//y"
    assert path_key("../../a") == "../../a" and path_key("a/..") == "." and path_key("\udce9/./x") == "\udce9/x"
    assert text_key("\ud83d  x") == "\ud83d x"


def test_the_command_keeps_them_out_of_training(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "#### 1"} for text in (*SPELLINGS[1:], OTHERS[0])]
    train = write_lines(tmp_path / "train.jsonl", rows)
    test = write_lines(tmp_path / "test.jsonl", [{"question": TEXT, "answer": "#### 1"}])
    arguments = ["--train", str(train), "--eval", str(test), "--out", str(tmp_path / "out"), "--workers", "0"]
    assert gsm8k.main(arguments) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["train"], report["left_out"]) == (1, {"also in the evaluation file": 5})


def test_a_duplicate_id_is_refused_with_its_first_location() -> None:
    first, second = replace(asks("q"), where="a.jsonl:1"), replace(asks("other"), where="b.jsonl:1")
    with Ledger() as ledger:
        _, refused = Splitter(ledger, 0.0, 0).assign(
            Verdict("train", one, keys=split_keys(one)) for one in (first, second)
        )
    assert isinstance(refused, BadSample) and refused.where == "b.jsonl:1"
    assert (
        "the id '1' was used before, at a.jsonl:1. Each row needs its own. Give each file once; where"
        in refused.message
    )


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


def test_media_may_be_fetched_later(prepared: Prepared) -> None:
    missing = record(2, path="./clips/gone.mp4")
    assert prepared.run([record(1), missing], "--eval-share", "0")["refused"] == {"missing_media": 1}
    report = prepared.run([record(1), missing], "--eval-share", "0", "--skip-media-check", "--overwrite")
    assert report["refused"] == {} and prepared.ids("train") == {"1", "2"}


def test_no_media_are_in_both_files_and_the_share_is_about_right(prepared: Prepared) -> None:
    records = [record(number, path=f"./clips/gone-{number % 200}.mp4") for number in range(600)]
    report = prepared.run(records, "--eval-share", "0.25", "--skip-media-check")
    train, evaluation = (kept(prepared.out, name) for name in ("train", "eval"))
    assert len(train) + len(evaluation) == 600 and 90 < report["eval"] < 210
    assert not {sample.media for sample in train} & {sample.media for sample in evaluation}


def test_the_split_of_a_record_does_not_depend_on_the_others_but_on_the_seed(prepared: Prepared) -> None:
    records = [record(number, path=f"./clips/gone-{number}.mp4") for number in range(60)]
    given = ("--eval-share", "0.4", "--skip-media-check", "--overwrite")
    prepared.run(records, *given)
    train, whole = prepared.ids("train"), prepared.ids("eval")
    paths = [f"./clips/gone-{sorted(split)[0]}.mp4" for split in (train, whole)]
    report = prepared.run([*records[:30], record(99, path=paths)], *given)
    assert report["left_out"] == {"media in both files": 1}
    assert prepared.ids("eval") == {sample_id for sample_id in whole if int(sample_id) < 30}
    prepared.run(records, *given, "--seed", "1")
    assert prepared.ids("eval") != whole
