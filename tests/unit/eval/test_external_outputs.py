"""Outputs made elsewhere: read in every form, scored, and what does not fit named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.eval.external_outputs import read_outputs, record_indices, score_outputs, write_lmms_samples
from vlm_pg.types import AnswerKind, MediaRef, Sample


def sample(name: str, gold: str, kind: AnswerKind = "multiple_choice", **details: Any) -> Sample:
    options = ("A. red", "B. blue", "C. blue") if kind == "multiple_choice" else ()
    video = MediaRef("video", f"{name}.mp4")
    return Sample(name, f"question {name}", (video,), options, gold, kind, "s", "c", details=details)


SAMPLES = [sample("q1", "A"), sample("q2", "B"), sample("q3", "C")]


def reader(asked: Sample, text: str, cut_off: bool) -> Reading:
    """The output is the answer; an empty one is none."""
    assert not cut_off
    return Reading(text or None, float(text == asked.answer))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_an_object_of_texts_and_lists(tmp_path: Path) -> None:
    path = written(tmp_path / "o.json", {"q1": "A", "q2": ["B", ""]})
    assert read_outputs(path, SAMPLES) == {"q1": ("A",), "q2": ("B", "")}


def test_lines_of_ids_and_outputs(tmp_path: Path) -> None:
    path = written(tmp_path / "o.jsonl", {"id": "q1", "output": "A"}, {"id": 7, "outputs": ["B", "C"], "time": 3})
    assert read_outputs(path, SAMPLES) == {"q1": ("A",), "7": ("B", "C")}


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("o.json", [{"q1": 3}], r"o.json:1: the output of question 'q1' is neither a text nor a list"),
        ("o.json", [{"q1": []}], r"neither a text nor a list of texts. Write \"\" for an output without text"),
        ("o.json", [["A"]], r"o.json"),
        ("o.jsonl", [{"id": "q1", "output": "A"}, {"id": "q2"}], r"o.jsonl:2 does not say one question's outputs"),
        ("o.jsonl", [{"id": "q1", "output": "A", "outputs": []}], r"o.jsonl:1 does not say one question's outputs"),
        ("o.jsonl", [{"id": True, "output": "A"}], r"o.jsonl:1 does not say one question's outputs"),
        (
            "o.jsonl",
            [{"id": "q", "output": "A"}, {"id": "q", "output": "B"}],
            r"o.jsonl:2: question 'q' is there twice",
        ),
        ("o.txt", [], r"no file of outputs by its name. A .json file"),
    ],
)
def test_other_files_are_refused_with_their_line(tmp_path: Path, name: str, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_outputs(written(tmp_path / name, *lines), SAMPLES)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file .*none.json"):
        read_outputs(tmp_path / "none.json", SAMPLES)


def test_an_id_twice_in_an_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text('{"q1": "A",\n "q1": "B"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"o.json:2: question 'q1' is there twice"):
        read_outputs(path, SAMPLES)


def lmms(place: int, target: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"doc_id": place, "target": target, "filtered_resps": list(texts), "doc_hash": "0", "input": "?", **more}


def test_samples_of_lmms_eval_by_their_place(tmp_path: Path) -> None:
    """``resps`` is what was generated; where it is left out ``filtered_resps`` says the same."""
    path = written(
        tmp_path / "20260101_samples_t.jsonl",
        lmms(2, "C", "C"),
        lmms(0, "A", "A", resps=[["I think A", "B"]]),
        lmms(1, "blue", "B", resps=["<think>x</think>B"]),
    )
    assert read_outputs(path, SAMPLES) == {"q3": ("C",), "q1": ("I think A", "B"), "q2": ("<think>x</think>B",)}


def test_samples_of_lmms_eval_by_an_id_in_doc(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl", lmms(0, "C", "C", doc={"question_id": "q3"}))
    assert read_outputs(path, SAMPLES, "question_id") == {"q3": ("C",)}
    with pytest.raises(ConfigError, match=r"s.jsonl:1: its doc has no id under 'pid' \(question_id\)"):
        read_outputs(path, SAMPLES, "pid")


@pytest.mark.parametrize("target", ["B", "blue"])
def test_samples_in_another_order_are_refused(tmp_path: Path, target: str) -> None:
    path = written(tmp_path / "s.jsonl", lmms(1, "B", "B"), lmms(0, target, "B"))
    with pytest.raises(
        ConfigError, match=rf"s.jsonl:2: target '{target}' is not the gold answer of question 'q1' \('A'\)"
    ):
        read_outputs(path, SAMPLES)


def test_an_order_that_nothing_confirms_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl", lmms(0, "crimson", "A"))
    with pytest.raises(ConfigError, match="0 of 1 targets confirm"):
        read_outputs(path, SAMPLES)


@pytest.mark.parametrize(
    ("gold", "target", "fits"),
    [("[24.3, 30.4]", "[24.296875, 30.40625]", True), ("[24.3, 30.4]", "[3.0, 9.0]", False), ("4", "4.0", True)],
)
def test_targets_with_numbers_are_compared_as_numbers(tmp_path: Path, gold: str, target: str, fits: bool) -> None:
    asked = [sample("q1", gold, "time_span" if "[" in gold else "numerical")]
    path = written(tmp_path / "s.jsonl", lmms(0, target, "x"))
    if fits:
        assert read_outputs(path, asked) == {"q1": ("x",)}
    else:
        with pytest.raises(ConfigError, match="is not the gold answer"):
            read_outputs(path, asked)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([lmms(3, "A", "A")], r"doc_id 3 is no index in the set of 3 questions"),
        (
            [lmms(0, "A", "A"), lmms(0, "A", "A")],
            r"s.jsonl:2: question 'q1' is there twice. A task with several filters",
        ),
        ([lmms(0, "A")], r"s.jsonl:1: resps and filtered_resps hold no texts"),
        ([lmms(0, "A", "A"), {"id": "q2", "output": "B"}], r"s.jsonl:2: doc_id None is no index"),
    ],
)
def test_damaged_samples_are_refused_with_their_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_outputs(written(tmp_path / "s.jsonl", *lines), SAMPLES)


def test_scoring_keeps_every_question_and_names_what_does_not_fit() -> None:
    """q1 right once of two, q2 not parsed, q3 without an output; 'other' belongs to none."""
    answered, figures = score_outputs(SAMPLES, {"q2": ("",), "q1": ("A", "B"), "other": ("A",)}, reader, "mean")
    assert [question.sample_id for question in answered] == ["q1", "q2", "q3"]
    assert answered[0].outputs[0] == Output("A", Reading("A", 1.0))
    assert answered[2].outputs == () and answered[2].fault == ("no_output", "no output was given for this question")
    assert figures.headline.value == 0.25 and figures.headline.n == 2
    assert [figures.measures[f"n_{cause}"] for cause in ("no_output", "bad_media", "unparsed")] == [1, 0, 1]
    assert figures.notes == (
        "1 of 3 questions have no output: 'q3'.",
        "1 of 3 ids of outputs belong to no question: 'other'.",
    )


def test_scoring_uses_the_aggregation_of_the_set() -> None:
    samples = [sample("q1", "A", task="x"), sample("q2", "B", task="x"), sample("q3", "C", task="y")]
    _, figures = score_outputs(samples, {"q1": ("A",), "q2": ("A",), "q3": ("A",)}, reader, "mvbench")
    assert figures.headline.value == 0.25 and figures.figures["mean over questions"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize("outputs", [{"1": ("A",), "2": ("B",)}, {}])
def test_outputs_of_another_set_are_refused(outputs: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(VlmPgError, match=r"None of the \d outputs belongs to one of the 3 questions.*'q1'"):
        score_outputs(SAMPLES, outputs, reader, "mean")


def test_what_is_written_for_lmms_eval_is_read_back(tmp_path: Path) -> None:
    answered, _ = score_outputs(SAMPLES, {"q1": ("A", "not \ud800 sure"), "q3": ("",)}, reader, "mean")
    path = tmp_path / "samples.jsonl"
    write_lmms_samples(path, answered, {"q1": 0, "q2": 1, "q3": 2})
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 2]
    assert rows[0]["resps"] == [["A", "not \ud800 sure"]] and rows[0]["filtered_resps"] == ["A", "not \ud800 sure"]
    assert rows[0]["target"] == "A" and rows[0]["accuracy"] == 0.5 and rows[1]["answers"] == [None]
    assert rows[0]["doc"] == {
        "id": "q1",
        "question": "question q1",
        "options": list(SAMPLES[0].options),
        "category": "c",
    }
    assert len(rows[0]["doc_hash"]) == 64
    by_place = read_outputs(path, SAMPLES)
    assert by_place == read_outputs(path, SAMPLES, "id") == {"q1": ("A", "not \ud800 sure"), "q3": ("",)}


def test_a_detail_called_id_does_not_take_the_questions_place(tmp_path: Path) -> None:
    asked = Answered.of(sample("q1", "A", id="theirs", url="u"), (Output("A", Reading("A", 1.0)),))
    write_lmms_samples(tmp_path / "s.jsonl", [asked], {"q1": 0})
    doc = json.loads((tmp_path / "s.jsonl").read_text("utf-8"))["doc"]
    assert doc["id"] == "q1" and doc["url"] == "u"


def test_places_count_all_records_of_the_set(tmp_path: Path) -> None:
    """The first cannot be used and the second is not asked: they have the places 0 and 1 all the same."""
    whole = {"problem": "1 + 1?", "data_type": "text", "problem_type": "numerical", "solution": "<answer>2</answer>"}
    records = [{"problem_id": "bad"}, whole | {"problem_id": "not asked"}, whole | {"problem_id": "q1"}]
    path = written(tmp_path / "set.jsonl", *records)
    places = record_indices(path)
    assert places == {"not asked": 1, "q1": 2}
    asked = Answered.of(sample("q1", "2", "numerical"), (Output("2", Reading("2", 1.0)),))
    write_lmms_samples(tmp_path / "s.jsonl", [asked], places)
    assert json.loads((tmp_path / "s.jsonl").read_text("utf-8"))["doc_id"] == 2
