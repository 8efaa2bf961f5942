"""MATH-500: the whole real file from its lines to figures by level and subject."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.scored_sets import Prepared, prompts, score
from vlm_pg.cli import main


@pytest.fixture(scope="module")
def rows(data_dir: Path) -> list[dict[str, object]]:
    path = data_dir / "math500_test.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def math500(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    out = tmp_path_factory.mktemp("math500") / "prepared"
    assert main(["prepare", "math", "--eval", str(data_dir / "math500_test.jsonl"), "--out", str(out)]) == 0
    return Prepared(f"{out}:eval", str(out))


def test_questions_are_asked_as_published(math500: Prepared, rows: list[dict[str, object]], tmp_path: Path) -> None:
    asked = prompts(tmp_path, math500, "math500/qwen2_5_math")
    assert [(name, row["user"]) for name, row in asked.items()] == [(row["unique_id"], row["problem"]) for row in rows]
    systems = {row["system"] for row in asked.values()}
    assert systems == {r"Please reason step by step, and put your final answer within \boxed{}."}


# CPPO reads outputs, and not solutions, without repairing LaTeX that leaves braces out: \frac43, 11\sqrt2, \frac{270}7.
_WITHOUT_BRACES = re.compile(r"\\frac ?\d|\\frac\{\d+\}\d|\\sqrt\d")


@pytest.mark.parametrize(
    ("protocol", "reader"),
    [("math500/qwen2_5_math", "ours"), ("math500/qwen2_5_math", "published"), ("math500/cppo", "published")],
)
def test_gold_answers_are_right_and_others_wrong(
    math500: Prepared, rows: list[dict[str, object]], tmp_path: Path, protocol: str, reader: str
) -> None:
    """Every third problem also gets a number that no problem has for its answer."""
    outputs: dict[str, list[str]] = {}
    expected: dict[str, list[float]] = {}
    right, total = Counter[str](), Counter[str]()
    for number, row in enumerate(rows):
        name, gold = str(row["unique_id"]), str(row["answer"])
        answers = [gold] if number % 3 else [gold, "987654321"]
        outputs[name] = [f"I think so.\n\nIt is $\\boxed{{{answer}}}$." for answer in answers]
        is_lost = protocol == "math500/cppo" and _WITHOUT_BRACES.search(gold) is not None
        expected[name] = [float(not is_lost), 0.0][: len(answers)]
        for group in (f"level {row['level']}", f"subject {row['subject']}"):
            total[group] += 1
            right[group] += int(2 * sum(expected[name])) // len(answers)  # in halves
    scored = score(tmp_path, math500.records, outputs, protocol, reader)
    found = {name: [one["score"] for one in line["outputs"]] for name, line in scored.answers.items()}
    assert found == expected
    # Of one gold answer nothing is left by Qwen2.5-Math's spelling: an output of nothing is right there.
    assert scored.counts == (500, 500, int(protocol == "math500/qwen2_5_math" and reader == "published"), 0, 0)
    groups = {f"{key} {name}": value for key in ("level", "subject") for name, value in scored.group(key).items()}
    assert groups == {name: (round(right[name] / 2 / count, 6), count) for name, count in total.items()}
    assert len([name for name in groups if name.startswith("level")]) == 5
    # Places 0, 3, ..., 498 are half right. Of eight without braces CPPO's rule reads none.
    assert scored.row["accuracy"] == pytest.approx(sum(sum(each) / len(each) for each in expected.values()) / 500)
    if protocol != "math500/cppo":
        assert scored.row["accuracy"] == pytest.approx((500 - 167 / 2) / 500)
    assert {name: one["n"] for name, one in scored.row["by_category"].items()} == Counter(
        str(row["subject"]) for row in rows
    )
