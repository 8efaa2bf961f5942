"""AMC 2023: math-ai/amc23's Parquet, Qwen2.5-Math's JSON lines."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published
from vlm_pg.types import Sample

WIKI = "https://artofproblemsolving.com/wiki/index.php"


def url(number: int, year: int = 2023) -> str:
    return f"{WIKI}/{year}_AMC_12A_Problems/Problem_{number}"


def sample(name: str, question: str, answer: str, details: dict[str, Any]) -> Sample:
    return Sample(name, question, (), (), answer, "mathematics", "amc2023", "amc2023", details=details)


PARQUET = [
    {"id": 0, "question": "How many miles from $A$?", "answer": "27", "url": url(1)},
    {"id": 1, "question": "What is $a_{2023}?$", "answer": "-1", "url": url(2)},
    {"id": 2, "question": "What share?", "answer": "1/2", "url": url(3)},
    {"id": 3, "question": "How many?", "answer": None, "url": url(4)},
    {"id": 4, "question": "How many then?", "answer": "8", "url": url(5, 2022)},
    {"id": 5, "question": " ", "answer": "8", "url": url(6)},
]
LINES = [
    {"id": 0, "problem": "How many miles from $A$?", "answer": 27.0, "url": url(1)},
    {"id": 1, "problem": "What is $a_{2023}?$", "answer": -1.0, "url": url(2)},
    {"id": 2, "problem": "How much is it?", "answer": 2.5, "url": url(3)},
    {"id": 2, "problem": "How many of those?", "answer": 3159.0, "url": url(4)},
    {"question": "How many of these?", "answer": 4},
    {"id": 2, "question": "And again?", "answer": 5},
]
KEPT = [
    sample("0", "How many miles from $A$?", "27", {"id": 0, "url": url(1)}),
    sample("1", "What is $a_{2023}?$", "-1", {"id": 1, "url": url(2)}),
]
OF_LINES = [
    *KEPT,
    sample("2", "How many of those?", "3159", {"id": 2, "url": url(4)}),
    sample("test-5", "How many of these?", "4", {}),
]
BAD_LINES = [("test.jsonl:3", "2", "no_gold_answer"), ("test.jsonl:6", "2", "duplicate_id")]
SHARD = "test-00000-of-00001.parquet"

CASES = {
    "math-ai": Published(
        {SHARD: PARQUET},
        (),
        KEPT,
        [
            (f"{SHARD}:3", "2", "no_gold_answer"),
            (f"{SHARD}:4", "3", "no_gold_answer"),
            (f"{SHARD}:5", "4", "other_data_set"),
            (f"{SHARD}:6", "5", "empty_question"),
        ],
    ),
    "Qwen2.5-Math, the repository": Published(
        {"evaluation/data/amc23/test.jsonl": LINES, "evaluation/data/aime24/test.jsonl": LINES[:1]},
        (),
        OF_LINES,
        BAD_LINES,
    ),
}
