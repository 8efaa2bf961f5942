"""One question in two spellings, or one medium under two, is one: not in training and evaluation, and told of once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipelines import gsm8k
from data_pipelines.engine.judging import Verdict, split_keys
from data_pipelines.engine.splits import Assigned, Repeats, Splitter
from tests.support.pipeline_rows import write_lines
from vlm_pg.check.leakage import question_key
from vlm_pg.data.dedup import Ledger, path_key, text_key
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


def test_ids_that_begin_anew_are_told_of_as_that() -> None:
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
