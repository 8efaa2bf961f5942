"""AMC 2023: 40 problems of the American Mathematics Competitions to checked records, for evaluation only.

    vlm-pg prepare amc2023 amc23 --out data/amc2023
    vlm-pg prepare amc2023 --eval test.jsonl --out data/amc2023

Published: math-ai/amc23 ``test-00000-of-00001.parquet``, rows ``id``, ``question``, ``answer`` (text), ``url``;
Qwen2.5-Math ``evaluation/data/amc23/test.jsonl``, rows ``id``, ``problem`` or ``question``, ``answer`` (27.0: a whole
number that is written as a fraction), ``url``. The competition offers five options; here the answer itself is expected,
in the form that some problems give ("What is m+n?"). All answers are whole numbers (27.0 is "27"), one of them -1.
Problems of another year by their ``url`` are refused. ``details`` have ``id`` and ``url``. No media.

Licence: the cards name none. The problems are the Mathematical Association of America's.

Record: {"problem_id": "0", "problem": "Cities $A$ and $B$ are $45$ miles apart. ...", "data_type": "text",
"problem_type": "mathematics", "options": [], "process": "", "solution": "<answer>27</answer>", "path": "",
"data_source": "amc2023",
"details": {"id": 0, "url": "https://artofproblemsolving.com/wiki/index.php/2023_AMC_12A_Problems/Problem_1"}}
"""

from __future__ import annotations

import re
from typing import Any

from data_pipelines.engine.answers import answered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import WITH_MEDIA, WITH_OPTIONS, DataSet, Form, Row
from data_pipelines.engine.fields import named, published, text_of, unusable, whole_number

_YEAR = re.compile(r"/([0-9]{4})_AMC")
_PROBLEM = ("question", "problem")


def to_record(row: Row) -> dict[str, Any]:
    url = row.get("url")
    year = _YEAR.search(url) if isinstance(url, str) else None
    if year is not None and year[1] != "2023":
        raise unusable("other_data_set", f"the problem is of {year[1]}", "One of 2023")
    return {
        "problem": text_of(row, *_PROBLEM),
        "data_type": "text",
        **answered("mathematics", whole_number(row, "answer")),
        "details": published(row, "id", "url"),
    }


_FORM = Form(
    "math-ai/amc23's Parquet or Qwen2.5-Math's amc23/test.jsonl",
    {"eval": (".:test", "amc23:test", "test.jsonl", "amc23/test.jsonl", "evaluation/data/amc23/test.jsonl")},
    (_PROBLEM, "answer"),
    to_record,
    questions=named("id"),
    suffixes=(".json", ".jsonl", ".parquet"),
    foreign=WITH_MEDIA | WITH_OPTIONS | {"solution": "sets with worked solutions"},
)
AMC2023 = DataSet("amc2023", (_FORM,))
main = pipeline(AMC2023, __doc__, __name__)
