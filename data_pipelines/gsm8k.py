"""GSM8K: its JSON lines (or Parquet) of questions and worked answers to checked records of numerical answers.

    python -m data_pipelines.gsm8k --train train.jsonl --eval test.jsonl --out data/gsm8k

The gold answer is the number behind "#### ". Questions have no media. Writes ``train.jsonl`` and ``eval.jsonl``;
refused rows go to ``refused.jsonl`` with their reason, and ``report.json`` counts everything. Questions of the
evaluation files are left out of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_pipelines.common import run
from data_pipelines.published import PublishedSet, Row, prepare
from vlm_pg.errors import SampleError

_BEFORE_GOLD = "####"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    return prepare(GSM8K, __doc__ or "", argv)


def to_record(row: Row, name: str) -> dict[str, Any]:
    """One row as a record.

    Raises:
        SampleError: ``no_gold_answer``.
    """
    _, mark, gold = str(row["answer"]).rpartition(_BEFORE_GOLD)
    if not mark:
        raise SampleError(
            "no_gold_answer",
            f"'answer' is '{str(row['answer'])[:80]}'. Reasoning that ends in '{_BEFORE_GOLD} ' and a number is "
            "expected. Correct it, or remove the row.",
        )
    return {
        "problem_id": name,
        "problem": row["question"],
        "data_type": "text",
        "problem_type": "numerical",
        "solution": f"<answer>{gold.strip().replace(',', '')}</answer>",
        "data_source": "gsm8k",
    }


GSM8K = PublishedSet("gsm8k", ("question", "answer"), to_record, has_media=False)

if __name__ == "__main__":
    raise SystemExit(run(main))
