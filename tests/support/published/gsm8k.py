"""GSM8K: openai/grade-school-math's JSON lines, and openai/gsm8k's Parquet."""

from __future__ import annotations

from tests.support.published.case import Published
from vlm_pg.types import Sample

TRAIN = [
    {"question": "How many in all?", "answer": "It is 3*4 = <<3*4=12>>12.\nSo 12.\n#### 12"},
    {"question": "How much?", "answer": "Much more.\n#### 2,125"},
    {"question": "What change?", "answer": "Less.\n#### -10"},
    {"question": "What share?", "answer": "Half.\n#### 0.5"},
    {"question": "How many?", "answer": "Nobody counted."},
    {"question": "Which one?", "answer": "The last.\n#### seven"},
    {"question": " ", "answer": "It is 4.\n#### 4"},
    {"question": "How far?", "answer": "6 miles.\n#### 6"},
]
TEST = [
    {"question": "How far?", "answer": "Six miles.\n#### 6"},
    {"question": "How long?", "answer": "8 hours.\n#### 8"},
]


def sample(name: str, question: str, answer: str, process: str) -> Sample:
    return Sample(name, question, (), (), answer, "numerical", "gsm8k", "gsm8k", process)


def kept(train: str, test: str) -> tuple[list[Sample], list[Sample]]:
    """What stays of these rows, by what each split's rows are named after."""
    return [
        sample(f"{train}-1", "How many in all?", "12", "It is 3*4 = 12.\nSo 12."),
        sample(f"{train}-2", "How much?", "2125", "Much more."),
        sample(f"{train}-3", "What change?", "-10", "Less."),
        sample(f"{train}-4", "What share?", "0.5", "Half."),
    ], [sample(f"{test}-1", "How far?", "6", "Six miles."), sample(f"{test}-2", "How long?", "8", "8 hours.")]


def refused(location: str, name: str) -> list[tuple[str, str, str]]:
    return [
        (f"{location}:5", f"{name}-5", "no_gold_answer"),
        (f"{location}:6", f"{name}-6", "no_gold_answer"),
        (f"{location}:7", f"{name}-7", "empty_question"),
    ]


FOLDER = "grade_school_math/data"
SHARD = "00000-of-00001.parquet"
IN_BOTH = {"also in the evaluation file": 1}

CASES = {
    "json lines": Published(
        {f"{FOLDER}/train.jsonl": TRAIN, f"{FOLDER}/test.jsonl": TEST},
        *kept("train", "test"),
        refused("train.jsonl", "train"),
        left_out=IN_BOTH,
    ),
    "Parquet": Published(
        {f"main/train-{SHARD}": TRAIN, f"main/test-{SHARD}": TEST, f"socratic/train-{SHARD}": TEST},
        *kept("main-train", "main-test"),
        refused(f"train-{SHARD}", "main-train"),
        left_out=IN_BOTH,
    ),
}
