"""VSI-590K and VSI-Bench become questions with options or numbers with partial credit; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import vsi
from data_pipelines.vsi import VSI
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row, parted, write_lines
from tests.support.tiny_media import png
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.types import BadSample, MediaRef, Sample


def row_590k(kind: str, question: str, answer: str, **media: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "question_type": kind, **(media or {"video": "scannet/scene0191_00.mp4"})}


COUNT = row_590k("absolute_count", "<image>\nThese are frames of a video.\nHow many chairs are in this room?", "4")
CLOSEST = row_590k(
    "relative_distance_object",
    "<image>\nThese are frames of a video.\nWhich is closest to the bed?\nOptions:\nA. lamp\nB. desk\nC. door",
    "B",
)
ORDER = row_590k(
    "appearance_order",
    "<image>\nThese are frames of a video.\nWhat appears first?\nA. bed, lamp\nB. lamp, bed\n"
    "Answer with the option's letter from the given choices directly.",
    "lamp, bed",
)
ANGLE = row_590k("absolute_direction_object", "<image>\nHow far do I turn, in degrees?", "240.0", image="s3dis/1.jpg")
REFUSED = {
    "no_gold_answer": row_590k("absolute_size_object", "<image>\nHow long is it, in cm?", "long"),
    "bad_options": row_590k("relative_count", "<image>\nMore?\nOptions:\nA. yes\nC. no", "A"),
    "too_few_options": row_590k("relative_count", "<image>\nMore?", "yes"),
    "answer_not_in_options": row_590k("relative_count", "<image>\nMore?\nA. yes\nB. no", "lamp"),
    "unknown_question_type": row_590k("route_length", "<image>\nHow far?", "4"),
    "bad_media": row_590k("absolute_count", "<image>\nHow many?", "4", video="a.mp4", image="a.jpg"),
    "bad_conversation": {**COUNT, "conversations": COUNT["conversations"] * 2},
}
OF_NUMBER = {
    "id": 0, "dataset": "arkitscenes", "scene_name": "41069025", "question_type": "object_counting",
    "question": "How many table(s) are in this room?", "ground_truth": "4", "options": None,
}  # fmt: skip
OF_CHOICE = {
    "id": 7, "dataset": "scannet", "scene_name": "scene0011_00", "question_type": "object_rel_direction_easy",
    "question": "If I stand by the stove, is the sofa to my left?", "ground_truth": "B",
    "options": ["A. left", "B. right"],
}  # fmt: skip


def bare(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, where="") for sample in samples]


def test_rows_of_vsi_590k(tmp_path: Path) -> None:
    for name in ("VSI-590K/scannet/scene0191_00.mp4", "VSI-590K/s3dis/1.jpg", "VSI-Bench/scannet/scene0191_00.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    rows = [COUNT, CLOSEST, ORDER, ANGLE, *REFUSED.values()]
    samples, refused = parted(VSI, write_lines(tmp_path / "vsi_590k.jsonl", rows), root=tmp_path)
    video = (MediaRef("video", "VSI-590K/scannet/scene0191_00.mp4"),)
    image = (MediaRef("image", "VSI-590K/s3dis/1.jpg"),)
    mra, choice = "mean_relative_accuracy", "multiple_choice"
    closest, first = ("A. lamp", "B. desk", "C. door"), ("A. bed, lamp", "B. lamp, bed")
    assert bare(samples) == [
        Sample("vsi_590k-1", "How many chairs are in this room?", video, (), "4", mra, "vsi_590k", "absolute_count"),
        Sample("vsi_590k-2", "Which is closest to the bed?", video, closest, "B", choice, "vsi_590k",
               "relative_distance_object"),
        Sample("vsi_590k-3", "What appears first?", video, first, "B", choice, "vsi_590k", "appearance_order"),
        Sample("vsi_590k-4", "How far do I turn, in degrees?", image, (), "240.0", mra, "vsi_590k",
               "absolute_direction_object"),
    ]  # fmt: skip
    assert [one.reason for one in refused] == list(REFUSED)


def check_bench(samples: list[Sample]) -> None:
    assert bare(samples) == [
        Sample("0", OF_NUMBER["question"], (MediaRef("video", "arkitscenes/41069025.mp4"),), (), "4",
               "mean_relative_accuracy", "vsi_bench", "object_counting",
               details={"question_type": "object_counting", "dataset": "arkitscenes", "scene_name": "41069025"}),
        Sample("7", OF_CHOICE["question"], (MediaRef("video", "scannet/scene0011_00.mp4"),), ("A. left", "B. right"),
               "B", "multiple_choice", "vsi_bench", "object_rel_direction_easy",
               details={"question_type": "object_rel_direction_easy", "dataset": "scannet",
                        "scene_name": "scene0011_00"}),
    ]  # fmt: skip


def test_rows_of_vsi_bench(tmp_path: Path) -> None:
    for name in ("arkitscenes/41069025.mp4", "scannet/scene0011_00.mp4"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    rows: list[Mapping[str, Any]] = [
        OF_NUMBER, OF_CHOICE, {**OF_NUMBER, "options": ["A. 1"]}, {**OF_NUMBER, "question_type": "shape"},
        {**OF_CHOICE, "ground_truth": "C"}, {**OF_CHOICE, "options": None},
    ]  # fmt: skip
    samples, refused = parted(VSI, write_lines(tmp_path / "test.jsonl", rows), root=tmp_path)
    check_bench(samples)
    reasons = ["bad_options", "unknown_question_type", "answer_not_in_options", "too_few_options"]
    assert [one.reason for one in refused] == reasons
    table = pyarrow.Table.from_pylist([{**row, "pruned": False} for row in rows[:2]])
    for name in ("test-00000-of-00001.parquet", "test_debiased.parquet"):
        pyarrow.parquet.write_table(table, tmp_path / name)
    check_bench(parted(VSI, Path(f"{tmp_path}:test"), root=tmp_path)[0])
    check_bench(parted(VSI, tmp_path / "test_debiased.parquet", root=tmp_path)[0])


def test_pictures_inside_rows_are_written_below_the_root_and_not_looked_for(tmp_path: Path) -> None:
    text = datasets.Value("string")
    features = datasets.Features(
        {"conversations": datasets.List({"from": text, "value": text}), "question_type": text}
        | {"image": datasets.Image()}
    )
    row = {name: COUNT[name] for name in ("conversations", "question_type")}
    rows = [row | {"image": {"bytes": png(), "path": None}}]
    (tmp_path / "VSI-590K").mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    (sample,), refused = parted(VSI, tmp_path / "rows.parquet", root=tmp_path)
    assert not refused and (tmp_path / sample.media[0].path).read_bytes() == png()


@pytest.mark.parametrize(("answer", "accuracy"), [("4", 1.0), ("3", 0.5), ("9", 0.0), ("four chairs", 0.0)])
def test_counts_earn_what_vsi_bench_gives(answer: str, accuracy: float) -> None:
    (sample,) = one_row(VSI, COUNT)
    assert isinstance(sample, Sample)
    with Rewarder(RewardSettings()) as rewarder:
        (scored,) = rewarder.score([Response(sample, f"<think>so</think><answer>{answer}</answer>")])
    assert scored.parts["accuracy"] == accuracy


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(vsi, COUNT, sample_id="vsi_590k-1")


def test_unknown_sentences_stay_in_the_question() -> None:
    (sample,) = one_row(VSI, row_590k("absolute_count", "<image>\nThese are photos.\nHow many chairs?", "4"))
    assert isinstance(sample, Sample) and sample.question == "These are photos.\nHow many chairs?"


@pytest.mark.parametrize("question", ["<image>\nHow many <image>s?", "<image><image>\nHow many chairs?"])
def test_marks_that_are_more_than_the_media_are_refused(question: str) -> None:
    (refused,) = one_row(VSI, row_590k("absolute_count", question, "4"))
    assert isinstance(refused, BadSample) and refused.reason == "media_mark_without_medium"


def test_odd_rows_are_refused() -> None:
    for row in (COUNT, CLOSEST):
        refused = dict(check_odd_rows(VSI, row))
        for value in ("None", "[]", "{}", "[None]", "[{}]", "True"):
            assert refused[f"conversations={value}"].reason == "bad_conversation"
        assert refused["video=None"].reason == "bad_media" and refused["question_type=7.5"].reason == "wrong_type"
    for row in (OF_NUMBER, OF_CHOICE):
        refused = dict(check_odd_rows(VSI, row, form=1))
        assert refused["ground_truth=True"].reason == refused["scene_name={}"].reason == "wrong_type"
        assert refused["without dataset"].reason == "missing_field"


@pytest.mark.parametrize("turn", [{"from": "gpt"}, {"from": "gpt", "value": None}, {"from": "gpt", "value": ["4"]}])
def test_a_turn_without_text_is_refused(turn: dict[str, Any]) -> None:
    (one,) = one_row(VSI, {**COUNT, "conversations": [COUNT["conversations"][0], turn]})
    assert isinstance(one, BadSample) and one.reason in ("no_gold_answer", "wrong_type")
