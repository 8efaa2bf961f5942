"""GSM8K: its JSON lines (or Parquet) of questions and worked answers to checked records of numerical answers.

    python -m data_pipelines.gsm8k --train train.jsonl --eval test.jsonl --out data/gsm8k

The gold answer is the number behind "#### ", or all of ``answer`` where that is a number; the question stands under
``question`` or ``problem`` (so do those of AMC and AIME). Questions have no media. Writes ``train.jsonl`` and
``eval.jsonl``; refused rows go to ``refused.jsonl`` with their reason, and ``report.json`` counts everything. Questions
of the evaluation files are left out of training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data_pipelines.common import run
from data_pipelines.published import PublishedSet, Row, first_of, plain_number, prepare
from vlm_pg.errors import SampleError

_BEFORE_GOLD = "####"
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    return prepare(GSM8K, __doc__ or "", argv)


def to_record(row: Row, name: str) -> dict[str, Any]:
    """One row as a record.

    Raises:
        SampleError: ``no_gold_answer``.
    """
    _, mark, gold = plain_number(row["answer"]).rpartition(_BEFORE_GOLD)
    gold = gold.strip().replace(",", "")
    if not mark and not _NUMBER.fullmatch(gold):
        raise SampleError(
            "no_gold_answer",
            f"'answer' is '{str(row['answer'])[:80]}'. A number, or reasoning that ends in '{_BEFORE_GOLD} ' and "
            "one, is expected. Correct it, or remove the row.",
        )
    return {
        "problem_id": name,
        "problem": first_of(row, "question", "problem"),
        "data_type": "text",
        "problem_type": "numerical",
        "solution": f"<answer>{gold}</answer>",
        "data_source": "gsm8k",
    }


GSM8K = PublishedSet("gsm8k", (("question", "problem"), "answer"), to_record, has_media=False)

if __name__ == "__main__":
    raise SystemExit(run(main))
