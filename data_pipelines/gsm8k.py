"""GSM8K: its JSON lines (or Parquet) of questions and worked answers to checked records of numerical answers.

    vlm-pg prepare gsm8k grade-school-math --out data/gsm8k
    vlm-pg prepare gsm8k --train train.jsonl --eval test.jsonl --out data/gsm8k

Published: openai/grade-school-math ``grade_school_math/data/{train,test}.jsonl``, rows ``question``, ``answer``
(worked, ending in "#### 72"); openai/gsm8k ``main/{train,test}-00000-of-00001.parquet``, the same. A plain number under
``answer`` is taken too, and ``problem`` for ``question`` (so are those of AMC and AIME written). No media.

Licence: MIT.

Record: {"problem_id": "train-17", "problem": "Natalia sold ...", "data_type": "text", "problem_type": "numerical",
"options": [], "process": "Natalia sold 48/2 = 24 ...", "solution": "<answer>72</answer>", "path": "",
"data_source": "gsm8k"}
"""

from __future__ import annotations

import re
from typing import Any

from data_pipelines.engine.answers import answered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import WITH_MEDIA, WITH_OPTIONS, DataSet, Form, Row
from data_pipelines.engine.fields import first_of, plain_number
from vlm_pg.errors import SampleError

_BEFORE_GOLD = "####"
# "48/2 = <<48/2=24>>24": calculator annotations beside the text.
_CALCULATION = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")


def to_record(row: Row) -> dict[str, Any]:
    process, _, gold = plain_number(row["answer"]).rpartition(_BEFORE_GOLD)
    gold = gold.strip().replace(",", "")
    if not _NUMBER.fullmatch(gold):
        raise SampleError(
            "no_gold_answer",
            f"'answer' is '{str(row['answer'])[:80]}'. A number, or reasoning that ends in '{_BEFORE_GOLD} ' and "
            "one, is expected. Correct it, or remove the row.",
        )
    return {
        "problem": first_of(row, "question", "problem"),
        "data_type": "text",
        **answered("numerical", gold),
        "process": _CALCULATION.sub("", process).strip(),
    }


_FORM = Form(
    "{train,test}.jsonl or main/*.parquet",
    {
        "train": ("train.jsonl", "grade_school_math/data/train.jsonl", "main:train", ".:train"),
        "eval": ("test.jsonl", "grade_school_math/data/test.jsonl", "main:test", ".:test"),
    },
    (("question", "problem"), "answer"),
    to_record,
    foreign=WITH_MEDIA | WITH_OPTIONS,
)
GSM8K = DataSet("gsm8k", (_FORM,))
main = pipeline(GSM8K, __doc__, __name__)
