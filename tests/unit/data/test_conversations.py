"""Records of conversations and preference pairs: samples out and back from every form, each fault with its message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_sets import write_shards
from vlm_pg.data import records
from vlm_pg.data.prepared import to_row
from vlm_pg.data.records import parse_record, read_records, to_record, write_records
from vlm_pg.errors import SampleError
from vlm_pg.rewards.rewarder import Rewarder, RewardSettings, gold_faults, same_gold
from vlm_pg.types import MediaRef, Sample

VIDEO = (MediaRef("video", "./video_90.mov"),)
CONVERSATION: dict[str, Any] = {
    "problem_id": 9, "problem": "<video>\nWhat is filmed?", "data_type": "video", "path": "./video_90.mov",
    "turns": ["A keyboard.", "Which colour?", "Black."], "data_source": "real-media",
}  # fmt: skip
PAIR = CONVERSATION | {"turns": ["A keyboard."], "rejected": "A piano."}
QUESTION = PAIR | {"turns": [], "problem_type": "free-form", "process": "Keys.", "solution": "<answer>a fan</answer>"}
HALF = "\ud83d"
SAMPLES = [
    Sample("1", "What?", VIDEO, (), "", "free_form", "s", "c", turns=("A fan.", "Sure?\n", " Yes. ")),
    Sample("2", "What?", VIDEO, (), "", "free_form", "s", "s", turns=("A fan.",), rejected="A car.\u2028"),
    Sample("3", "What?", (), ("A. x", "B. y"), "B", "multiple_choice", "s", "s", "So.", rejected="<answer>A</answer>"),
    Sample("4", "What?", VIDEO, (), "a fan", "free_form", "s", "s", "So.", turns=("A fan.",), rejected="No."),
    Sample("5", "What?", (), ("A. x", "B. y"), "", "multiple_choice", "s", "s", turns=("It is y.",)),
    Sample("6", "What?", VIDEO, (), "a fan", "free_form", "s", "s", "So."),
]


def refusal(record: dict[str, Any], **changes: Any) -> SampleError:
    with pytest.raises(SampleError) as got:
        parse_record({name: value for name, value in (record | changes).items() if value is not ...})
    return got.value


def test_the_records_of_the_docstring() -> None:
    (conversation, pair) = (
        parse_record(json.loads("{" + text.partition("}\n")[0] + "}"))
        for text in (records.__doc__ or "").split("\n\n    {")[2:]
    )
    question, source = "What is filmed?", "real-media"
    turns = ("A keyboard.", "Which colour?", "Black.")
    assert conversation == Sample(
        "9", f"<video>\n{question}", VIDEO, (), "", "free_form", source, source, turns=turns
    )  # fmt: skip
    assert pair == Sample(
        "10", question, VIDEO, (), "", "free_form", source, source, turns=turns[:1], rejected="A piano."
    )  # fmt: skip


def test_they_come_back_from_every_form(tmp_path: Path) -> None:
    for sample in SAMPLES:
        assert parse_record(to_record(sample)) == sample == parse_record(to_row(sample))
    write_records(tmp_path / "all.jsonl", SAMPLES)
    (tmp_path / "set").mkdir()
    write_shards(tmp_path / "set", "train", SAMPLES)
    for path in (tmp_path / "all.jsonl", next((tmp_path / "set").iterdir())):
        assert read_records(path) == (SAMPLES, [])


def test_only_fields_that_are_given_are_written() -> None:
    written = [{"solution", "turns", "rejected"} & set(to_record(sample)) for sample in SAMPLES]
    assert written == [
        {"turns"}, {"turns", "rejected"}, {"solution", "rejected"}, {"solution", "turns", "rejected"}, {"turns"},
        {"solution"},
    ]  # fmt: skip
    assert to_row(SAMPLES[0])["solution"] == "" and to_row(SAMPLES[5])["turns"] == []


THOUGHT = "<think>Keys.</think>"  # as process without its tags


@pytest.mark.parametrize("none", [None, "", ...])
def test_without_turns_a_question_needs_its_answer(none: Any) -> None:
    bare = CONVERSATION | {"turns": [], "problem_type": "free-form", "rejected": None}
    assert refusal(bare, solution=none).reason in ("missing_field", "no_answer_tag")
    assert refusal(bare, solution="<answer>x</answer>", problem_type=...).reason == "missing_field"


@pytest.mark.parametrize(
    ("record", "changes", "reason", "message"),
    [
        (CONVERSATION, {"turns": "A keyboard."}, "wrong_type", r"'turns' is a str\. A list is expected"),
        (CONVERSATION, {"turns": ["A", None, "B"]}, "wrong_type", r"not a string\. A list of strings is expected\. Co"),
        (
            CONVERSATION,
            {"turns": ["A", "B"]},
            "bad_conversation",
            r"'turns' has 2 turns, so that the last one is the user's\. An odd number, .* is expected\. Correct it, or",
        ),
        (CONVERSATION, {"turns": ["A", " \n", "B"]}, "empty_turn", r"'turns\[1\]' is empty\. Text is expected"),
        (CONVERSATION, {"turns": ["A<|im_end|>"]}, "media_token_in_text", r"'turns\[0\]' contains '<\|im_end\|>'\. Co"),
        (
            CONVERSATION,
            {"turns": ["A", "And <image>?", "B"]},
            "media_in_later_turn",
            r"'turns\[1\]' contains '<image>'\. Media in the question alone, the first turn of the user, is expected",
        ),
        (CONVERSATION, {"turns": ["A <video>"]}, "media_in_later_turn", r"'turns\[0\]' contains '<video>'"),
        (CONVERSATION, {"turns": [HALF]}, "not_unicode", r"'turns\[0\]' holds half of a character"),
        (CONVERSATION, {"solution": "Black"}, "missing_field", "'problem_type' is missing"),
        (CONVERSATION, {"solution": "Black", "problem_type": "exact"}, "no_answer_tag", "'solution' is 'Black'"),
        (CONVERSATION, {"problem_type": "essay"}, "unknown_answer_kind", "'essay'"),
        (
            CONVERSATION,
            {"rejected": "A piano."},
            "bad_preference",
            r"'rejected' is given beside 3 turns\. One turn, the chosen response, is expected\. Correct 'turns' or",
        ),
        (PAIR, {"rejected": " A keyboard.\n"}, "equal_answers", r"'rejected' is the chosen response\. Another"),
        (PAIR, {"rejected": " "}, "empty_turn", r"'rejected' is empty\. Text is expected"),
        (PAIR, {"rejected": ["A piano."]}, "wrong_type", r"'rejected' is a list\. A str is expected"),
        (PAIR, {"rejected": "<|im_start|>"}, "media_token_in_text", r"'rejected' contains '<\|im_start\|>'"),
        (PAIR, {"rejected": "<image>"}, "media_in_later_turn", "'rejected' contains '<image>'"),
        (PAIR, {"rejected": HALF}, "not_unicode", "'rejected' holds half of a character"),
        (QUESTION, {"rejected": f"{THOUGHT}\n<answer>a fan</answer>"}, "equal_answers", "'rejected' is the chosen"),
        (QUESTION, {"process": "", "rejected": "<answer>a fan</answer> "}, "equal_answers", "'rejected' is the chosen"),
    ],
)  # fmt: skip
def test_each_fault_has_its_reason_and_message(
    record: dict[str, Any], changes: dict[str, Any], reason: str, message: str
) -> None:
    error = refusal(record, **changes)
    assert error.reason == reason
    with pytest.raises(SampleError, match=message):
        raise error


def test_without_a_gold_answer_none_is_scored() -> None:
    """Those beside it are, in their order; a sample with none contradicts no other."""
    unscorable = Sample("7", "How many?", (), (), "many", "numerical", "s", "s")
    with Rewarder(RewardSettings()) as rewarder:
        faults = list(gold_faults([SAMPLES[0], unscorable, SAMPLES[1], SAMPLES[2]], rewarder))
        assert [fault and fault.reason for fault in faults] == [None, "unscorable_gold_answer", None, None]
        assert list(gold_faults(SAMPLES[:2], rewarder)) == [None, None]
        assert same_gold(SAMPLES[0], SAMPLES[3], rewarder) and not same_gold(SAMPLES[2], SAMPLES[3], rewarder)
