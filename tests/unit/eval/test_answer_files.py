"""Rows of answers are read back as they were written, also around lines that a kill truncated."""

from __future__ import annotations

import json
from pathlib import Path

from vlm_pg.eval.answer_files import AnswerFiles, read_answers
from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.types import MediaRef, Sample

CLIP = MediaRef("video", "a.mp4", start=2.0, end=5.0)
SAMPLE = Sample("7", "Which?", (CLIP,), ("A. x", "B. y"), "B", "multiple_choice", "s", "c", details={"level": 1})
OUTPUTS = (
    Output("B", Reading("B", 1.0), "stop", 2),
    Output("A or B", Reading(None, 0.0, "several"), "length", 9),
    Output("", Reading(None, 0.0, "empty", counts=False)),
)


def test_a_row_is_read_back_equal() -> None:
    answered = Answered.of(SAMPLE, OUTPUTS)
    assert Answered.from_row(json.loads(json.dumps(answered.to_row()))) == answered
    # What was read stands there once: of long evaluations these are gigabytes.
    first = {"text": "B", "answer": "B", "score": 1.0, "note": "", "counts": True, "finish_reason": "stop"}
    assert answered.to_row()["outputs"][0] == first | {"num_tokens": 2}
    refused = Answered.of(SAMPLE, (), ("cannot_decode", "the file is damaged"))
    assert Answered.from_row(json.loads(json.dumps(refused.to_row()))) == refused


def test_a_question_scores_the_mean_of_what_counts() -> None:
    assert Answered.of(SAMPLE, OUTPUTS).score == 0.5
    assert Answered.of(SAMPLE, ()).score is None


def test_clips_of_one_video_are_one_cluster() -> None:
    assert Answered.of(SAMPLE, ()).cluster == "a.mp4"
    alone = Sample("8", "How many?", (), (), "3", "numerical", "s", "c")
    assert Answered.of(alone, ()).cluster == "8"


def test_parts_of_all_ranks_are_resumed_without_truncated_lines(tmp_path: Path) -> None:
    """A row without a fault takes the place of one with a fault."""

    def row(name: str, fault: tuple[str, str] | None = None) -> dict:
        return Answered.of(Sample(name, "?", (), (), "A", "exact", "s", "c"), (), fault).to_row()

    first, second = (AnswerFiles(tmp_path, rank) for rank in (0, 1))
    first.append("s", [row("a"), row("b", ("cannot_decode", "damaged"))])
    part = tmp_path / "answers_s.part-0.jsonl"
    part.write_bytes(part.read_bytes() + b'{"sample_id": "c", "quest')
    first.append("s", [row("d")])
    second.append("s", [row("b")])
    assert {name: one["fault"] for name, one in second.finished_rows("s").items()} == dict.fromkeys("abd")
    assert AnswerFiles(tmp_path, 0, resumable=False).finished_rows("s") == {}
    first.complete("s", [row("a"), row("b")])
    assert [path.name for path in tmp_path.iterdir()] == ["answers_s.jsonl"]
    assert [one.sample_id for one in read_answers(tmp_path / "answers_s.jsonl")] == ["a", "b"]
