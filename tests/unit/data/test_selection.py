"""What ``vlm-pg select`` selects, counts and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.data.records import write_records
from vlm_pg.data.sample_sets import open_records
from vlm_pg.data.selection import Selection, records_of, select
from vlm_pg.errors import ConfigError
from vlm_pg.types import MediaRef, Sample

RECORDS = [
    Sample(name, "Which?", (MediaRef("video", "a.mp4", 1.0, 2.0),), ("A. x", "B. y"), "B", "multiple_choice", "s", "s")
    for name in ("easy", "mixed", "hard", "faulty", "unsampled")
]


def response(text: str, accuracy: float | None, tokens: int = 10, finish_reason: str = "stop") -> dict[str, Any]:
    return {"text": text, "tokens": tokens, "finish_reason": finish_reason, "accuracy": accuracy}


ROWS = [
    {
        "problem_id": "easy",
        "p_correct": 1.0,
        "responses": [response("B", 1.0), response("B ", 1.0), response("so B", 1.0)],
    },
    {
        "problem_id": "mixed",
        "p_correct": 0.5,
        "responses": [
            response("<think>1", 1.0, 3),
            response("A", 0.0),
            response("cut", 1.0, 99, "length"),
            response("<|im_end|>", 1.0),
            response("right", 1.0),
            response("C", 0.0),
            response("D", 0.0),
            response("?", None),
        ],
    },
    {"problem_id": "hard", "p_correct": 0.0, "responses": [response("A", 0.0)]},
    {"problem_id": "faulty", "p_correct": None, "responses": [], "fault": ["corrupt_media", "no video"]},
    {"problem_id": "gone", "p_correct": 1.0, "responses": []},
]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    write_records(tmp_path / "records.jsonl", RECORDS)
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "samples.jsonl"


def selected(samples: Path, **wanted: Any) -> tuple[list[Sample], list[str]]:
    out = samples.parent / "out"
    lines = select(samples, records_of(samples, [str(samples.parent / "records.jsonl")]), out, Selection(**wanted))
    return list(open_records(Path(f"{out}:train"))[0]), lines


def test_right_responses_become_records_and_the_rest_is_counted(samples: Path) -> None:
    found, lines = selected(samples)
    # In an order drawn from the seed within a question.
    assert [one.sample_id.partition("-")[0] for one in found] == ["easy"] * 2 + ["mixed"] * 2
    assert {one.sample_id: one.turns for one in found} == {
        "easy-0": ("B",),
        "easy-2": ("so B",),
        "mixed-0": ("<think>1",),
        "mixed-4": ("right",),
    }
    assert {(one.question, one.media, one.options, one.answer) for one in found} == {
        (RECORDS[0].question, RECORDS[0].media, RECORDS[0].options, "B")
    }
    assert lines[0] == "selected: 4 responses of 2 questions, from 12 responses of 4 questions"
    assert set(lines[1:-1]) == {
        "removed: 1 responses with the text of another one of their question",
        "removed: 4 responses with an accuracy below 1",
        "removed: 1 responses cut off at rollout.max_new_tokens",
        "removed: 1 responses that no record may have (media_token_in_text)",
        "removed: 1 responses without an accuracy",
        "removed: 1 questions that could not be sampled",
        "removed: 1 records that were not sampled",
        "removed: 1 rows of the samples without a record",
    }
    out = samples.parent
    assert lines[-1] == f"train with training.objective=sft data.train={out}/out:train data.media_root={out}"
    assert json.loads((out / "out/selection.json").read_text())["lines"] == lines[:-1]


@pytest.mark.parametrize(
    "wanted, ids, line",
    [
        ({"difficulty": (0.2, 0.8)}, {"mixed-0", "mixed-4"}, "2 questions outside --difficulty 0.2 0.8"),
        ({"min_tokens": 5}, {"easy-0", "easy-2", "mixed-4"}, "1 responses outside --min-tokens and --max-tokens"),
        ({"max_tokens": 5}, {"mixed-0"}, "9 responses outside --min-tokens and --max-tokens"),
        ({"min_accuracy": 0.0, "difficulty": (0, 0)}, {"hard-0"}, "2 questions outside --difficulty 0 0"),
    ],
)
def test_filters(samples: Path, wanted: dict[str, Any], ids: set[str], line: str) -> None:
    found, lines = selected(samples, **wanted)
    assert {one.sample_id for one in found} == ids
    assert f"removed: {line}" in lines


def test_the_seed_draws_those_of_a_question(samples: Path) -> None:
    drawn = set()
    for seed in range(8):
        data = records_of(samples, [str(samples.parent / "records.jsonl")])
        out = samples.parent / f"out-{seed}"
        lines = select(samples, data, out, Selection(per_question=1, seed=seed))
        assert "removed: 2 responses above --per-question 1" in lines
        found = list(open_records(Path(f"{out}:train"))[0])
        assert len(found) == 2
        drawn.add(found[1].sample_id)
    assert drawn == {"mixed-0", "mixed-4"}


def test_pairs_use_each_response_once(samples: Path) -> None:
    found, lines = selected(samples, pairs=True)
    assert {one.turns[0] for one in found} == {"<think>1", "right"}
    rejected = [one.rejected for one in found]
    assert len(set(rejected)) == 2 and set(rejected) < {"A", "C", "D"}
    assert lines[0].startswith("selected: 2 pairs of 1 questions")
    assert "removed: 4 responses without a counterpart for a pair" in lines
    assert lines[-1].startswith("train with training.objective=dpo data.train=")


def test_a_response_behind_an_opened_thought_begins_with_it(samples: Path) -> None:
    row = {"problem_id": "easy", "p_correct": 1.0, "opened": "<think>\n", "responses": [response("x</think>B", 1.0)]}
    samples.write_text(json.dumps(row) + "\n")
    assert selected(samples)[0][0].turns == ("<think>\nx</think>B",)


def test_refusals(samples: Path, tmp_path: Path) -> None:
    data = records_of(samples, [f"{tmp_path}/records.jsonl"])
    for path, out, wanted, message in (
        (
            tmp_path / "none",
            "out",
            {},
            r"none is not a file\. The samples.jsonl of a finished vlm-pg sample is expected",
        ),
        (samples, "records.jsonl", {}, r"records.jsonl exists already\. The set is written to a new folder\."),
        (
            samples,
            "out",
            {"difficulty": (0.5, 0.2)},
            r"--difficulty is 0.5 0.2\. LOW and HIGH with 0 <= LOW <= HIGH <= 1",
        ),
        (
            samples,
            "out",
            {"min_tokens": 1000},
            r"Nothing of .* is selected: selected: 0 responses .* widen the selection",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            select(path, data, tmp_path / out, Selection(**wanted))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(ConfigError, match=r"has no protocol.json of vlm-pg sample, .* Give them with --records PATH"):
        records_of(samples, [])
    with pytest.raises(ConfigError, match=r"--records is a.jsonl, b=b.jsonl\. Of several sets each needs a name"):
        records_of(samples, ["a.jsonl", "b=b.jsonl"])
    for text, message in (
        (json.dumps(ROWS[0]) + "\n{}\n", r"samples.jsonl:2 is no row of vlm-pg sample\. One JSON object per question"),
        (2 * (json.dumps(ROWS[0]) + "\n"), r"samples.jsonl:2 is a second row of 'easy'\. One JSON object per question"),
    ):
        samples.write_text(text)
        with pytest.raises(ConfigError, match=message):
            select(samples, data, tmp_path / "out", Selection())


def test_records_and_media_roots_are_those_that_were_sampled(samples: Path) -> None:
    recorded = {"train": {"one": "data/one.jsonl"}, "media_root": {"one": "media"}}
    (samples.parent / "protocol.json").write_text(json.dumps({"config": {"data": recorded}}))
    data = records_of(samples.parent, [])
    assert data.train_sets == {"one": Path("data/one.jsonl")}
    assert data.root_for(Path("data/one.jsonl"), "one") == Path("media")
    moved = records_of(samples, ["one=elsewhere/one.jsonl"])
    assert moved.train_sets == {"one": Path("elsewhere/one.jsonl")}
    assert moved.root_for(Path("elsewhere/one.jsonl"), "one") == Path("media")
