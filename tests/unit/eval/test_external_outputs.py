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


def reader(question: Sample, text: str, cut_off: bool) -> Reading:
    """The output is the answer; an empty one is none."""
    assert not cut_off
    return Reading(text or None, float(text == question.answer))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def lmms(index: int, target: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"doc_id": index, "target": target, "filtered_resps": list(texts), "doc_hash": "0", "input": "?", **more}


def test_objects_and_lines_of_texts_and_lists(tmp_path: Path) -> None:
    path = written(tmp_path / "o.json", {"q1": "A", "q2": ["B", ""]})
    assert read_outputs(path, SAMPLES) == {"q1": ("A",), "q2": ("B", "")}
    path = written(tmp_path / "o.jsonl", {"id": "q1", "output": "A"}, {"id": 7, "outputs": ["B", "C"], "time": 3})
    assert read_outputs(path, SAMPLES) == {"q1": ("A",), "7": ("B", "C")}


A_TWICE = [{"id": "q", "output": "A"}, {"id": "q", "output": "B"}]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("o.json", [{"q1": 3}], r"o.json:1: the output of question 'q1' is neither a text nor a list"),
        ("o.json", [{"q1": []}], r"neither a text nor a list of texts. Write \"\" for an output without text"),
        ("o.json", ['{"q1": "A",\n "q1": "B"}'], r"o.json:2: question 'q1' is there twice"),
        ("o.jsonl", [{"id": "q1", "output": "A"}, {"id": "q2"}], r"o.jsonl:2 does not say one question's outputs"),
        ("o.jsonl", [{"id": "q1", "output": "A", "outputs": []}], r"o.jsonl:1 does not say one question's outputs"),
        ("o.jsonl", [{"id": True, "output": "A"}], r"o.jsonl:1 does not say one question's outputs"),
        ("o.jsonl", A_TWICE, r"o.jsonl:2: question 'q' is there twice"),
        ("o.txt", [], r"no file of outputs by its name. A .json file"),
        ("", [], r"There is no file .*none.json"),
        ("s.jsonl", [lmms(3, "A", "A")], r"doc_id 3 is no index in the set of 3 questions"),
        ("s.jsonl", [lmms(0, "A", "A"), lmms(0, "A", "A")], r"s.jsonl:2: question 'q1' is there twice. A task with"),
        ("s.jsonl", [lmms(0, "A")], r"s.jsonl:1: resps and filtered_resps hold no texts"),
        ("s.jsonl", [lmms(0, "A", "A"), {"id": "q2", "output": "B"}], r"s.jsonl:2: doc_id None is no index"),
        # Samples in another order, and in one that nothing confirms.
        ("s.jsonl", [lmms(1, "B", "B"), lmms(0, "B", "B")], r":2: target 'B' is not the gold answer of question 'q1'"),
        ("s.jsonl", [lmms(1, "B", "B"), lmms(0, "blue", "B")], r"target 'blue' is not the gold answer of .* \('A'\)"),
        ("s.jsonl", [lmms(0, "crimson", "A")], "0 of 1 targets confirm"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, lines: list[Any], message: str) -> None:
    path = tmp_path / "none.json"
    if name:
        path = written(tmp_path / name, *lines)
    if lines and isinstance(lines[0], str):
        path.write_text(lines[0])
    with pytest.raises(ConfigError, match=message):
        read_outputs(path, SAMPLES)


def test_samples_of_lmms_eval_by_their_index(tmp_path: Path) -> None:
    """``resps`` is what was generated; where it is left out ``filtered_resps`` says the same."""
    path = written(
        tmp_path / "20260101_samples_t.jsonl",
        lmms(2, "C", "C"),
        lmms(0, "A", "A", resps=[["I think A", "B"]]),
        lmms(1, "blue", "B", resps=["<think>x</think>B"]),
    )
    assert read_outputs(path, SAMPLES) == {"q3": ("C",), "q1": ("I think A", "B"), "q2": ("<think>x</think>B",)}
    path = written(tmp_path / "s.jsonl", lmms(0, "C", "C", doc={"question_id": "q3"}))
    assert read_outputs(path, SAMPLES, "question_id") == {"q3": ("C",)}
    with pytest.raises(ConfigError, match=r"s.jsonl:1: its doc has no id under 'pid' \(question_id\)"):
        read_outputs(path, SAMPLES, "pid")
    # Targets with numbers are compared as numbers.
    for gold, target, wrong in (("[24.3, 30.4]", "[24.296875, 30.40625]", "[3.0, 9.0]"), ("4", "4.0", "5")):
        samples = [sample("q1", gold, "time_span" if "[" in gold else "numerical")]
        assert read_outputs(written(path, lmms(0, target, "x")), samples) == {"q1": ("x",)}
        with pytest.raises(ConfigError, match="is not the gold answer"):
            read_outputs(written(path, lmms(0, wrong, "x")), samples)


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


def test_indices_count_all_records_and_a_detail_called_id_is_no_id(tmp_path: Path) -> None:
    """The first record is unusable and the second excluded: they have the indices 0 and 1 all the same."""
    whole = {"problem": "1 + 1?", "data_type": "text", "problem_type": "numerical", "solution": "<answer>2</answer>"}
    records = [{"problem_id": "bad"}, whole | {"problem_id": "excluded"}, whole | {"problem_id": "q1"}]
    indices = record_indices(written(tmp_path / "set.jsonl", *records))
    assert indices == {"excluded": 1, "q1": 2}
    answered = Answered.of(sample("q1", "2", "numerical", id="theirs", url="u"), (Output("2", Reading("2", 1.0)),))
    write_lmms_samples(tmp_path / "s.jsonl", [answered], indices)
    row = json.loads((tmp_path / "s.jsonl").read_text("utf-8"))
    assert row["doc_id"] == 2 and row["doc"]["id"] == "q1" and row["doc"]["url"] == "u"
