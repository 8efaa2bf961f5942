"""Gold answers of published data sets earn full accuracy in every usual style; answers of another value earn none."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import gsm8k, math, nextqa
from data_pipelines.engine.dataset import Row
from vlm_pg.answers.choices import split_options
from vlm_pg.data.records import parse_record
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.types import Sample

pytestmark = pytest.mark.matrix

Case = tuple[Sample, str]
Styles = dict[str, Callable[[str], str]]

GSM8K_STYLES: Styles = {
    "plain": str,
    "thousands": lambda gold: f"{int(gold):,}",
    "decimals": lambda gold: f"{int(gold)}.00",
    "currency": lambda gold: f"${int(gold):,}.",
    "unit": lambda gold: f"{gold} km/h",
    "sentence": lambda gold: f"The answer is {int(gold):,} dollars.",
    "boxed": lambda gold: rf"\boxed{{{gold}}}",
    "LaTeX": lambda gold: rf"$\${gold}$",
}
MATH_STYLES: Styles = {
    "plain": str,
    "full stop": lambda gold: f"{gold}.",
    "dollars": lambda gold: f"${gold}$",
    "boxed": lambda gold: rf"\boxed{{{gold}}}",
    "sentence": lambda gold: f"The answer is ${gold}$.",
}
NEXTQA_STYLES: Styles = {
    "letter": str,
    "brackets": lambda letter: f"({letter})",
    "option": lambda letter: f"Option {letter}",
    "small": lambda letter: f"{letter.lower()})",
    "sentence": lambda letter: f"The answer is {letter}.",
    "boxed": lambda letter: rf"\boxed{{\text{{{letter}}}}}",
}


@pytest.fixture(scope="module")
def rewarder() -> Iterator[Rewarder]:
    with Rewarder(RewardSettings()) as opened:
        yield opened


def accuracies(rewarder: Rewarder, cases: Sequence[Case]) -> list[float | None]:
    responses = [Response(sample, f"<think>x</think><answer>{answer}</answer>") for sample, answer in cases]
    return [reward.parts["accuracy"] for reward in rewarder.score(responses)]


def share_with(rewarder: Rewarder, cases: Sequence[Case], wanted: float) -> tuple[float, list[str]]:
    """Share of the cases that earn what is wanted, and the others as text."""
    found = accuracies(rewarder, cases)
    others = [
        f"{sample.sample_id}: gold {sample.answer!r}, answer {answer!r}: {value}"
        for (sample, answer), value in zip(cases, found, strict=True)
        if value != wanted
    ]
    return 1.0 - len(others) / len(cases), others


def jsonl_samples(path: Path, to_record: Callable[[Row], dict[str, Any]]) -> list[Sample]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [sample_of(to_record(json.loads(line)), f"row-{number}") for number, line in enumerate(lines)]


def sample_of(record: dict[str, Any], name: str) -> Sample:
    return parse_record({"problem_id": name, "data_type": "video"} | record)


def others_answers(samples: Sequence[Sample], is_same: Callable[[str, str], bool], how_many: int) -> Iterator[Case]:
    """Each sample with the gold answers of the next ``how_many`` samples whose answers differ from its own."""
    for index, sample in enumerate(samples):
        following = (samples[(index + step) % len(samples)].answer for step in range(1, len(samples)))
        different = (answer for answer in following if not is_same(answer, sample.answer))
        yield from ((sample, next(different)) for _ in range(how_many))


def test_gsm8k(data_dir: Path, rewarder: Rewarder) -> None:
    samples = jsonl_samples(data_dir / "gsm8k_test.jsonl", gsm8k.to_record)
    assert len(samples) == 1319
    right = [(sample, style(sample.answer)) for sample in samples for style in GSM8K_STYLES.values()]
    share, others = share_with(rewarder, right, 1.0)
    assert share == 1.0, others[:20]
    styles = list(GSM8K_STYLES.values())
    wrong = others_answers(samples, lambda left, right: float(left) == float(right), 4)
    cases = [(sample, styles[index % len(styles)](answer)) for index, (sample, answer) in enumerate(wrong)]
    share, others = share_with(rewarder, cases, 0.0)
    assert share >= 0.999, others[:20]


def test_math(data_dir: Path, rewarder: Rewarder) -> None:
    samples = jsonl_samples(data_dir / "math500_test.jsonl", math.to_record)
    assert len(samples) == 500
    right = [(sample, style(sample.answer)) for sample in samples for style in MATH_STYLES.values()]
    share, others = share_with(rewarder, right, 1.0)
    assert share >= 0.995, others[:20]
    cases = list(others_answers(samples, same_mathematics, 2))
    share, others = share_with(rewarder, cases, 0.0)
    assert share >= 0.999, others[:20]


def same_mathematics(left: str, right: str) -> bool:
    """Whether two answers may have the same value: equal numbers, or equal texts but for how LaTeX sets them."""
    numbers = plain_number(left), plain_number(right)
    return plain_text(left) == plain_text(right) if None in numbers else numbers[0] == numbers[1]


def plain_text(latex: str) -> str:
    text = re.sub(r"\\(?:left|right|text|mbox|mathrm|textbf|[!,;: ])|\^\{?\\circ\}?|[\s{}$]|\\\$|\\%", "", latex)
    return re.sub(r"^[a-z](?:=|\\in)", "", re.sub(r"\\[dt]frac", r"\\frac", text).rstrip("."))


def plain_number(latex: str) -> Fraction | None:
    """The value of 12, 1,234, 0.5, 3/4 and \\frac{3}{4}, units of letters left out."""
    text = re.sub(r"\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?", r"\1/\2", re.sub(r"\\left|\\right|\\[!,; $]|[\s$]", "", latex))
    match = re.fullmatch(
        r"([+-]?[\d,]*\.?\d+)(?:/(\d+))?(?:\\(?:text|mbox)\{.*\}.*|\\%|\^\{?\\circ\}?|_\{?\d+\}?)?", text
    )
    return None if match is None else Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def test_nextqa(data_dir: Path, rewarder: Rewarder) -> None:
    with (data_dir / "nextqa_val.csv").open(encoding="utf-8", newline="") as file:
        samples = [sample_of(nextqa.to_record(row), f"{row['video']}_{row['qid']}") for row in csv.DictReader(file)]
    assert len(samples) == 4996
    right: list[Case] = []
    wrong: list[Case] = []
    for index, sample in enumerate(samples):
        texts = dict(split_options(sample.options))
        right += [(sample, style(sample.answer)) for style in NEXTQA_STYLES.values()]
        right.append((sample, f"{sample.answer}. {texts[sample.answer]}"))
        other_letters = [letter for letter in texts if letter != sample.answer]
        wrong += [(sample, letter) for letter in other_letters]
        other = other_letters[index % len(other_letters)]
        wrong += [(sample, f"({other}) {texts[other]}."), (sample, texts[other])]
        # A text that two options share names neither.
        is_clear = [text.strip().lower() for text in texts.values()].count(texts[sample.answer].strip().lower()) == 1
        (right if is_clear else wrong).append((sample, texts[sample.answer]))
    share, others = share_with(rewarder, right, 1.0)
    assert share == 1.0, others[:20]
    share, others = share_with(rewarder, wrong, 0.0)
    assert share >= 0.999, others[:20]
