"""AIME 2024: HuggingFaceH4's and Maxwell-Jia's Parquet, Qwen2.5-Math's lines; BytedTsinghua-SIA's repeated rows."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published
from vlm_pg.types import Sample

SENTENCES = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
WIKI = "https://artofproblemsolving.com/wiki/index.php"


def url(number: int, year: int = 2024) -> str:
    return f"{WIKI}/{year}_AIME_I_Problems/Problem_{number}"


def sample(name: str, question: str, answer: str, details: dict[str, Any], process: str = "") -> Sample:
    return Sample(name, question, (), (), answer, "mathematics", "aime2024", "aime2024", process, details=details)


def row(number: int, problem: str, answer: Any, year: int = 2024) -> dict[str, Any]:
    solution = f"So it is $\\boxed{{{answer}}}$."
    found = {"id": number, "problem": problem, "solution": solution, "answer": answer, "url": url(number, year)}
    return found | {"year": str(year)}


HUB = [
    row(60, "How long is her walk?", "204"),
    row(61, "What is $xy$?", "025"),
    row(62, "What is the remainder?", "000"),
    row(63, "What is it?", "1000"),
    row(64, "What is half of it?", "12.5"),
    row(65, "What was it?", "7", 2023),
    row(66, "", "7"),
]
OF_HUB = [
    sample("60", "How long is her walk?", "204", {"id": 60, "url": url(60)}, HUB[0]["solution"]),
    sample("61", "What is $xy$?", "25", {"id": 61, "url": url(61)}, HUB[1]["solution"]),
    sample("62", "What is the remainder?", "0", {"id": 62, "url": url(62)}, HUB[2]["solution"]),
]


def of_hub_refused(location: str) -> list[tuple[str, str, str]]:
    return [
        (f"{location}:4", "63", "no_gold_answer"),
        (f"{location}:5", "64", "no_gold_answer"),
        (f"{location}:6", "65", "other_data_set"),
        (f"{location}:7", "66", "missing_field"),
    ]


CAPITALS = [
    {"ID": "2024-II-4", "Problem": "What is $m+n$?", "Solution": "Denote ...", "Answer": 33},
    {"ID": "2024-I-13", "Problem": "What is $p$?", "Solution": "It is 110.", "Answer": 110},
    {"ID": "2023-I-13", "Problem": "What was $p$?", "Solution": "It is 111.", "Answer": 111},
]
OF_CAPITALS = [
    sample("2024-II-4", "What is $m+n$?", "33", {"id": "2024-II-4"}, "Denote ..."),
    sample("2024-I-13", "What is $p$?", "110", {"id": "2024-I-13"}, "It is 110."),
]


def prompted(problem: str, answer: str, index: int) -> dict[str, Any]:
    content = f"{SENTENCES[0]}\n\n{problem}\n\n{SENTENCES[1]}"
    found = {"data_source": "math_dapo", "prompt": [{"content": content, "role": "user"}], "ability": "MATH"}
    return found | {
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index, "raw_problem": problem, "split": None},
    }


# Each of three problems 32 times; of one, one answer differs from the other 31.
REPEATED = [
    prompted(problem, answer, 3 * copy + number)
    for copy in range(32)
    for number, (problem, answer) in enumerate([("Walk?", "204"), ("Halves?", "1/2"), ("Sum?", "033")])
]
REPEATED[95] = prompted("Sum?", "34", 95)
SHARD, OTHER = "train-00000-of-00001.parquet", "aime_2024_problems.parquet"
LINES = "evaluation/data/aime24/test.jsonl"

CASES = {
    "HuggingFaceH4": Published({f"data/{SHARD}": HUB}, (), OF_HUB, of_hub_refused(SHARD), forms=(1,)),
    "Maxwell-Jia": Published(
        {OTHER: CAPITALS}, (), OF_CAPITALS, [(f"{OTHER}:3", "2023-I-13", "other_data_set")], forms=(1,)
    ),
    "Qwen2.5-Math": Published({LINES: HUB}, (), OF_HUB, of_hub_refused("test.jsonl"), forms=(1,)),
    "BytedTsinghua-SIA": Published(
        {"data/aime-2024.parquet": REPEATED},
        (),
        [
            sample("aime-2024-1", "Walk?", "204", {"id": 0}),
            sample("aime-2024-3", "Sum?", "33", {"id": 2}),
            sample("aime-2024-96", "Sum?", "34", {"id": 95}),
        ],
        [("aime-2024.parquet:2", "aime-2024-2", "no_gold_answer")],
        # 31 further rows of each problem but the one whose answer is another.
        left_out={"repeated problems": 92},
    ),
}
