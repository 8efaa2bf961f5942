"""MATH: one object a file; EleutherAI/hendrycks_math, Parquet by subject; MATH-500."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published
from vlm_pg.types import Sample


def row(problem: str, solution: str, subject: str = "Algebra") -> dict[str, Any]:
    return {"problem": problem, "level": "Level 2", "type": subject, "solution": solution}


HALF = row("Half of one?", r"We halve $1 = \boxed{1}$, so $\boxed{\frac{1}{2}}$.")
SET = row("Which solve it?", r"They are $\boxed{\{1, 2\}}$.")
SPACED = row("What is $x$?", r"It is $\boxed 7$.", "Geometry")
WORDS = row("Even or odd?", r"It is $\fbox{\text{even}}$.", "Number Theory")
UNBOXED = row("What is it?", "Nobody knows.")
OPEN = row("What is left?", r"It is $\boxed{\frac{1}{2}$.")
DRAWN = row("How wide is it?\n[asy] draw((0,0)--(1,0)); [/asy]", r"$\boxed{1}$")
TWO = {
    "problem": "One and one?",
    "solution": r"It is $\boxed{2.0}$.",
    "answer": "2",
    "subject": "Number Theory",
    "level": 1,
    "unique_id": "test/number_theory/7.json",
}
POINT = TWO | {
    "problem": "Which point?",
    "solution": r"It is $\boxed{\left( 3, \frac{\pi}{2} \right)}$.",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "unique_id": "test/precalculus/807.json",
}


def sample(name: str, published: dict[str, Any], answer: str) -> Sample:
    subject = published.get("subject") or published["type"]
    process = published["solution"]
    details = {"subject": subject, "level": published["level"]}
    details |= {key: published[key] for key in ("unique_id",) if key in published}
    return Sample(name, published["problem"], (), (), answer, "mathematics", "math", subject, process, details=details)


FILES = {
    "train/algebra/1.json": HALF,
    "train/algebra/2.json": UNBOXED,
    "train/algebra/10.json": SET,
    "train/geometry/1.json": SPACED,
    "test/algebra/1.json": DRAWN,
    "test/number_theory/3.json": WORDS,
    "test/number_theory/4.json": OPEN,
}
# Files in the order of their names as text: 1, 10, 2.
TRAIN = [
    sample("train/algebra/1.json", HALF, r"\frac{1}{2}"),
    sample("train/algebra/10.json", SET, r"\{1, 2\}"),
    sample("train/geometry/1.json", SPACED, "7"),
]
TEST = [sample("test/algebra/1.json", DRAWN, "1"), sample("test/number_theory/3.json", WORDS, r"\text{even}")]
REFUSED = [
    ("2.json:1", "train/algebra/2.json", "no_gold_answer"),
    ("4.json:1", "test/number_theory/4.json", "no_gold_answer"),
]
SHARD = "00000-of-00001.parquet"
OF_500 = [sample("test/number_theory/7.json", TWO, "2"), sample("test/precalculus/807.json", POINT, POINT["answer"])]

CASES = {
    "one object a file": Published(
        {f"MATH/{name}": row for name, row in FILES.items()}, TRAIN, TEST, REFUSED, forms=(1,)
    ),
    "Parquet by subject": Published(
        {
            f"algebra/train-{SHARD}": [HALF, UNBOXED],
            f"algebra/test-{SHARD}": [DRAWN],
            f"geometry/train-{SHARD}": [SPACED],
            f"geometry/test-{SHARD}": [WORDS],
        },
        [sample("algebra-train-1", HALF, r"\frac{1}{2}"), sample("geometry-train-1", SPACED, "7")],
        [sample("algebra-test-1", DRAWN, "1"), sample("geometry-test-1", WORDS, r"\text{even}")],
        [(f"train-{SHARD}:2", "algebra-train-2", "no_gold_answer")],
        forms=(2,),
    ),
    "MATH-500": Published({"test.jsonl": [TWO, POINT]}, (), OF_500),
    "MATH beside MATH-500": Published(
        {**{f"MATH/{name}": row for name, row in FILES.items()}, "MATH-500/test.jsonl": [TWO, POINT]},
        TRAIN,
        OF_500,
        REFUSED[:1],
        forms=(0, 1),
        unread=(("eval", "MATH/test/algebra/1.json", 3),),
    ),
    "trained on all of MATH but what MATH-500 asks": Published(
        {
            "MATH/train/algebra/1.json": HALF,
            "MATH/test/x/7.json": row(TWO["problem"], r"$\boxed{2}$"),
            "500.jsonl": [TWO],
        },
        TRAIN[:1],
        OF_500[:1],
        arguments=("--train", "{}/MATH/train/algebra/1.json", "{}/MATH/test/x/7.json", "--eval", "{}/500.jsonl"),
        left_out={"also in the evaluation file": 1},
        forms=(0, 1),
    ),
}
