"""GSM8K from its JSON lines to its figures: a small file made here, and the whole real test file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.published.case import Published
from tests.support.scored_sets import Prepared, Row, check_table, prepare, prompts, score
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix

GOLDS = ("1,250", "27", "18", "6", "-10", "0.5", "8", "9")
QUESTIONS = {3: "How much in dollars does she make every day?", 5: "By how much does it change?"}
TEST = [
    {"question": QUESTIONS.get(number, f"How many of kind {number}?"), "answer": f"Count <<1+1=2>>2.\n#### {gold}"}
    for number, gold in enumerate(GOLDS, start=1)
]
CASE = Published({"grade_school_math/data/test.jsonl": [*TEST, {"question": "How many?", "answer": "Nobody knows."}]},
                 refused=[("test.jsonl:9", "test-9", "no_gold_answer")])  # fmt: skip
# Published (Qwen2.5-Math): the box, else behind "he answer is", else the last number; a hundredth of the gold is right.
TABLE = [
    Row("test-1", "The total is $1,250.", ("1250", 1), ("1250", 1)),
    Row("test-2", r"Thus \boxed{0.27}", ("0.27", 0), ("0.27", 1)),
    Row("test-3", "So she makes $18.00 every day.", ("18", 1), ("18", 1)),
    Row("test-4", "First I count 5. No, wait: one more. The answer is 6.", ("6", 1), ("6", 1)),
    Row("test-5", "The change is -10.", ("-10", 1), ("-10", 1)),
    Row("test-6", "It is 1/2.", ("0.5", 1), ("2", 0)),
    Row("test-7", "", (None, 0), (None, 0)),
]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("gsm8k", tmp_path_factory.mktemp("gsm8k"), CASE)


def test_questions_are_asked_as_published(gsm8k: Prepared, tmp_path: Path) -> None:
    row = prompts(tmp_path, gsm8k, "gsm8k/qwen2_5_math")["test-1"]
    assert (row["system"], row["user"], row["media"]) == (
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "How many of kind 1?",
        [],
    )
    assert row["settings"]["max_new_tokens"] == 2048 and row["settings"]["sampling"]["num_generations"] == 1
    cppo = prompts(tmp_path, gsm8k, "gsm8k/cppo")["test-1"]
    # Its recipe for GSM8K says nothing of a box, which that for mathematics does.
    assert cppo["system"].endswith("</think>\n<answer> answer here </answer>.") and "boxed" not in cppo["system"]
    assert cppo["settings"]["max_new_tokens"] == 1024 and cppo["settings"]["sampling"]["temperature"] == 0.0


def test_outputs_and_figures(gsm8k: Prepared, tmp_path: Path) -> None:
    ours, published = check_table(tmp_path, gsm8k, TABLE, "gsm8k/qwen2_5_math")
    # test-8 has no output. Ours: 1, 3, 4, 5, 6 of 7. Published: 1, 2, 3, 4, 5 of 7.
    for scored in (ours, published):
        assert scored.counts == (8, 7, 1, 0, 1)
        assert scored.row["accuracy"] == pytest.approx(5 / 7)
        assert [scored.figure(name) for name in ("mean@1", "majority@1", "pass@1")] == [round(5 / 7, 6)] * 3
    assert published.row["reader"] == "gsm8k/qwen25_math"


def test_all_real_questions(data_dir: Path, tmp_path: Path) -> None:
    """Every gold answer in a box is right; one more than it is wrong, and right by a relative 1e-4 from 9,999 on."""
    path = data_dir / "gsm8k_test.jsonl"
    assert main(["prepare", "gsm8k", "--eval", str(path), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    golds = [int(row["answer"].split("#### ")[1].replace(",", "")) for row in rows]
    assert len(golds) == 1319
    outputs = {
        f"gsm8k_test-{number}": [f"So it is $\\boxed{{{gold}}}$.", f"So it is $\\boxed{{{gold + 1}}}$."]
        for number, gold in enumerate(golds, start=1)
    }
    large = sum(abs(gold + 1) >= 10_000 for gold in golds)
    assert large > 0
    for reader, second in (("ours", 0), ("published", large)):
        scored = score(tmp_path / reader, f"{tmp_path / 'out'}:eval", outputs, "gsm8k/qwen2_5_math", reader)
        assert scored.counts == (1319, 1319, 0, 0, 0)
        right = [[one["score"] for one in line["outputs"]] for line in scored.answers.values()]
        assert sum(first == 1.0 for first, _ in right) == 1319
        assert sum(each[1] for each in right) == second
        assert scored.row["accuracy"] == pytest.approx((1319 + second) / 2638)
        # The vote of two that differ is shared evenly, so it equals the mean.
        assert (scored.figure("pass@2"), scored.figure("majority@2")) == (1.0, scored.figure("mean@2"))
