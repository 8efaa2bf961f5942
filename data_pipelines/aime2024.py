"""AIME 2024: 30 problems of the American Invitational Mathematics Examination to checked records, for evaluation only.

    vlm-pg prepare aime2024 aime_2024 --out data/aime2024
    vlm-pg prepare aime2024 --eval aime_2024_problems.parquet --out data/aime2024

Published: HuggingFaceH4/aime_2024 ``data/train-00000-of-00001.parquet`` (called train, meant for evaluation), rows
``id``, ``problem``, ``solution``, ``answer`` (text of three digits, "025"), ``url``, ``year``; Maxwell-Jia/AIME_2024
``aime_2024_problems.parquet``, rows ``ID`` ("2024-II-4"), ``Problem``, ``Solution``, ``Answer`` (a number);
Qwen2.5-Math ``evaluation/data/aime24/test.jsonl``, as the first; BytedTsinghua-SIA/AIME-2024
``data/aime-2024.parquet``, rows ``prompt`` (the problem between two sentences that say how to answer, which are taken
away), ``reward_model`` with ``ground_truth``, ``extra_info`` with ``index`` and, in some copies, ``raw_problem``: each
problem stands there 32 times. One of each is kept, the other 930 rows are counted as left out; to sample more answers
is for the evaluation to say. Answers are whole numbers from 0 to 999 and are kept as such: "025" is "25". Problems of
which ``url``, ``year`` or ``ID`` tells another year, as two thirds of AI-MO/aimo-validation-aime, are refused. A
``solution`` becomes ``process``. ``details`` have ``id`` and ``url``. No media.

Licence: Maxwell-Jia's copy is MIT, of the others see their cards. The problems are the Mathematical Association of
America's.

Record: {"problem_id": "2024-II-4", "problem": "Let $x,y$ and $z$ be positive real numbers ...", "data_type": "text",
"problem_type": "mathematics", "options": [], "process": "Denote ...", "solution": "<answer>33</answer>", "path": "",
"data_source": "aime2024", "details": {"id": "2024-II-4"}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, without_sentences
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import WITH_MEDIA, WITH_OPTIONS, DataSet, Form, Row, read_rows
from data_pipelines.engine.fields import (
    called,
    first_of,
    list_of,
    named,
    object_of,
    plain_number,
    published,
    text_of,
    unusable,
    whole_number,
)
from vlm_pg.data.dedup import text_key
from vlm_pg.data.files import RecordLocation
from vlm_pg.errors import SampleError

_PROBLEM, _SOLUTION, _ANSWER = ("problem", "Problem", "question"), ("solution", "Solution"), ("answer", "Answer")
_ID = ("id", "ID")
_YEARS = (re.compile(r"/([0-9]{4})_AIME"), re.compile(r"([0-9]{4})(?:-I{1,2}-[0-9]{1,2})?"))
_LARGEST = 999
_REPEATED = "_repeated"
# What stands around each problem where rows are made for training.
_AROUND = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)


def of_problem(row: Row) -> dict[str, Any]:
    """One row of a problem and its answer as a record."""
    url, year, name = row.get("url"), row.get("year"), row.get("ID")
    matches = [_YEARS[0].search(url) if isinstance(url, str) else None]
    matches += [_YEARS[1].fullmatch(plain_number(value)) for value in (year, name) if value is not None]
    other = next((found[1] for found in matches if found is not None and found[1] != "2024"), None)
    if other is not None:
        raise unusable("other_data_set", f"the problem is of {other}", "One of 2024")
    details = published({"id": first_of(row, *_ID), "url": row.get("url")}, "id", "url")
    solution = first_of(row, *_SOLUTION)
    record = _record(text_of(row, *_PROBLEM), whole_number(row, *_ANSWER), details)
    return record | {"process": solution if isinstance(solution, str) else ""}


def of_prompt(row: Row) -> dict[str, Any]:
    """One row of a prompt and the answer that is rewarded as a record."""
    gold = whole_number(object_of(row["reward_model"], "'reward_model'"), "ground_truth")
    more = row.get("extra_info")
    details = {"id": more["index"]} if isinstance(more, dict) and more.get("index") is not None else {}
    return _record(_problem_of(row), gold, details)


def _record(problem: str, gold: str, details: dict[str, Any]) -> dict[str, Any]:
    if not 0 <= int(gold) <= _LARGEST:
        raise unusable("no_gold_answer", f"the answer is {gold}", f"A whole number from 0 to {_LARGEST}")
    return {"problem": problem, "data_type": "text", **answered("mathematics", gold), "details": details}


def _problem_of(row: Row) -> str:
    """The problem of a prompt, as published beside it or between the sentences around it."""
    more = row.get("extra_info")
    if isinstance(more, dict) and more.get("raw_problem") not in (None, ""):
        return text_of(more, "raw_problem").strip()
    messages = list_of(row, "prompt")
    if len(messages) != 1:
        raise unusable("bad_conversation", f"'prompt' has {len(messages)} messages", "One, with the problem,")
    return without_sentences(text_of(object_of(messages[0], "the message"), "content"), _AROUND)


def _rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows; those with the problem and answer of an earlier one are marked."""
    known: set[tuple[str, str]] = set()
    for location, row in read_rows(path):
        key = None
        with suppress(SampleError):  # it is refused later
            gold = called(object_of(object_of(row, "the row").get("reward_model"), "'reward_model'"), "ground_truth")
            key = text_key(_problem_of(row)), gold
        yield location, row | {_REPEATED: True} if key in known else row
        known.update([key] if key else [])


_PROMPTS = Form(
    "BytedTsinghua-SIA/AIME-2024, each problem 32 times",
    {"eval": ("data/aime-2024.parquet", "aime-2024.parquet")},
    ("prompt", "reward_model"),
    of_prompt,
    rows=_rows,
    questions=lambda row, name: [] if row.get(_REPEATED) else [(name, row)],  # an earlier row asks the same
    suffixes=(".json", ".jsonl", ".parquet"),
    empty="repeated problems",
)
_PROBLEMS = Form(
    "rows of problem and answer",
    {
        "eval": (
            ".:train",
            "aime_2024_problems.parquet",
            "test.jsonl",
            "aime24/test.jsonl",
            "evaluation/data/aime24/test.jsonl",
        )
    },
    (_PROBLEM, _ANSWER),
    of_problem,
    questions=named(_ID),
    suffixes=(".json", ".jsonl", ".parquet"),
    foreign=WITH_MEDIA | WITH_OPTIONS | {"unique_id": "MATH-500"},
)
AIME2024 = DataSet("aime2024", (_PROMPTS, _PROBLEMS))
main = pipeline(AIME2024, __doc__, __name__)
