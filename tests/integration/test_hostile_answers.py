"""Answers written to break a checker: no code runs, nothing hangs, and at least 99 % are answered within a second each.

The second is the pool's own deadline (1 s per answer, measured from handing it out): what took longer says so in its
note. What was late is checked once more, alone and after all others, and counts if it is late again: an answer is to
blame then, not a machine that was busy for a moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.answers.helpers import GOLD, make_sample
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.settings import CheckerSettings, LanguageSettings, RepetitionSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind, RewardBreakdown

pytestmark = pytest.mark.matrix

NUM_ANSWERS = 1000
LENGTHS = (3, 8, 40, 400, 3000)
# More kinds of gold answers that mathematics compares in different ways.
MATHEMATICS_GOLD = ("5", r"\frac{\sqrt{3}}{2}", "x^2+2x+1", r"\{1, 2, 3\}", "(3, 4]", "y = 2x + 1", "x < 3", "2^{100}")

# Words between spaces.
WRAPS = r"{} ${}$ \boxed{{{}}} \text{{{}}} \operatorname{{{}}}(1) x_{{{}}} \left({}\right)"
PIECES = r"$ \$ = x=1, 1< \pm1 \cdot9 /2 +x % & \begin{ ^"
OPERATORS = r"int_0^1 sum_{n=1}^{10^9} prod_{n=1}^{10^9} lim_{x\to0} iint oint log_2 det"
COMMANDS = r"\frac \sqrt \pi \infty \sin \log \cdot \text \le \cup \pm \circ"
FORMS = r"""
{}! {}!! ({}!)! 2^{{{}}} {}^{{{}}} \sqrt[{}]{{2}} \binom{{{}}}{{7}} (x+y+z)^{{{}}} x^{{{}}}=1 x^{{{}}}<1 \gcd({},7)
\sin({}) \log_{{{}}}7 7\mod{{{}}} e^{{{}}} 1.0000001^{{{}}} {}e{} 10^{{-{}}} \frac{{1}}{{{}}} \sqrt{{{}}}
\begin{{pmatrix}}1&2\\3&4\end{{pmatrix}}^{{{}}}
"""


def code_answers(canary: Path) -> Iterator[str]:
    """Texts that make the file ``canary`` if anything evaluates them."""
    touch = f"open({str(canary)!r}, 'w').close()"
    for code in (
        f"__import__('os').system('touch {canary}')",
        touch,
        f"exec({touch!r})",
        f"(lambda: {touch})()",
        f"[c for c in ().__class__.__base__.__subclasses__()][0] and {touch}",
        f"sympy.sympify({touch!r})",
        f"{{{{{touch}}}}}",
        f"5); {touch}; (5",
        f"5\n{touch}",
        f"!!python/object/apply:os.system ['touch {canary}']",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"Integer(5) if {touch} else 5",
    ):
        for wrap in WRAPS.split():
            yield wrap.format(code)
    for command in ("write18", "input", "def", "csname", "openout", "newcommand", "loop", "let"):
        for count in (1, 100):
            yield rf"\{command}" * count + f"{{touch {canary}}}"


def built_answers() -> Iterator[str]:
    """Towers of powers, nesting, size, slow matching, odd characters, operators that never end."""
    for depth in range(2, 14):
        for base in ("9", "2.5", "x", "e", "-1", "0.5"):
            yield "**".join([base] * depth)
            yield "^{".join([base] * depth) + "}" * (depth - 1)
            yield "^(".join([base] * depth) + ")" * (depth - 1)
    yield from ("9" * 1_000_000, "(" * 1_000_000, "A " * 500_000)
    for length in (*LENGTHS, 10_000):
        for opening, closing in (
            *(("(", ")"), ("[", "]"), ("{", "}"), ("\\frac{1}{", "}"), ("\\left(", "\\right)"), ("\\sqrt{", "}")),
            *(("|", "|"), ("x_{", "}"), ("\\boxed{", "}"), ("$", "$"), ("\\(", "\\)"), ("f(", ")"), ("\\sin(", ")")),
            *(("\\text{", "}"), ("\\begin{pmatrix}", "\\end{pmatrix}"), ("<answer>", ""), ("-", ""), ("!", "")),
        ):
            yield opening * length + "1" + closing * length
            yield opening * length
            yield "1" + closing * length
    for length in LENGTHS:
        for piece in (
            *("9", "1,", "1 ", "9.", "1e9", "½", "٣", "𝟗", "\x00", "\u202e", "é", "\ud7ff", "ﷺ", " ", "\n", "\t", "\\"),
            *("a", "A ", "B. ", "Option A ", "yes no ", "1:", "12:34 ", "0.5-", "[1,2,3,4]", "(1,2),"),
            *("the answer is ", "\\le ", "\\\\", *PIECES.split()),
        ):
            yield piece * length
            yield piece * length + "!"
    for count in (1, 2, 3, 6):
        for operator in OPERATORS.split():
            yield f"\\{operator} " * count + "x^x" + " dx" * count
    for number in (10, 1000, 10**6, 10**9, 10**18, 10**60, 10**400):
        for form in FORMS.split():
            yield form.format(number, number)
    for size in (2, 6, 10, 30, 1000):
        yield "\\begin{pmatrix}" + "\\\\".join(["&".join(["1"] * size)] * size) + "\\end{pmatrix}"
        yield "\\det\\begin{pmatrix}" + "\\\\".join(["&".join(["x"] * size)] * size) + "\\end{pmatrix}"
        yield "{" + ",".join(map(str, range(size))) + "}"
        yield "+".join(f"\\sqrt{{{number}}}" for number in range(2, size + 2))
        yield "".join(f"(x-{number})" for number in range(size))
        yield "+".join(f"x^{{{number}}}" for number in range(size)) + "=0"
        yield "\\cup ".join(f"({number}, {number + 1})" for number in range(size))


def random_answers(count: int) -> Iterator[str]:
    """Random strings of the grammar itself, which find what no list does."""
    choose = random.Random(0)
    tokens = [*"19xy+-*/^_(){}[],=<!|%.", *COMMANDS.split()]
    for _ in range(count):
        yield " ".join(choose.choices(tokens, k=choose.randrange(2, 60)))


def answers(canary: Path, count: int) -> list[str]:
    """So many texts: all of the code, and the others in a fixed random choice."""
    code, built = list(code_answers(canary)), list(built_answers())
    chosen = [*code, *random_answers(count // 4)]
    mixed = random.Random(1)
    chosen += mixed.sample(built, count - len(chosen))
    mixed.shuffle(chosen)
    return chosen


@pytest.fixture
def settings() -> RewardSettings:
    return RewardSettings(
        repetition=RepetitionSettings(weight=0.1),
        language=LanguageSettings(weight=0.1),
        checker=CheckerSettings(workers=1, timeout_seconds=1.0),
    )


def test_hostile_mathematics_is_answered_within_a_second_and_runs_nothing(tmp_path: Path, settings: RewardSettings):
    canary = tmp_path / "canary"
    samples = [make_sample("mathematics", gold) for gold in MATHEMATICS_GOLD]
    responses = [
        Response(samples[index % len(samples)], f"<think>x</think><answer>{answer}</answer>")
        for index, answer in enumerate(answers(canary, NUM_ANSWERS))
    ]
    with Rewarder(settings) as rewarder:
        rewards = rewarder.score(responses)
        late = [response for response, reward in zip(responses, rewards, strict=True) if is_late(reward)]
        unvalued = [reward.notes for reward in rewards if reward.parts["accuracy"] is None]
        late_again = [response.text[:100] for response in late if is_late(rewarder.score([response])[0])]
        assert len(rewarder.pids) == settings.checker.workers
        [after] = rewarder.score([Response(samples[0], "<answer>$x = 5$</answer>")])
    assert after.parts["accuracy"] == 1.0, "the pool answers as before"
    assert not canary.exists(), "a text was executed"
    assert len(late_again) <= NUM_ANSWERS // 100, late_again
    assert len(unvalued) == len(late), "the deadline is the only reason for no value"


def is_late(reward: RewardBreakdown) -> bool:
    return "deadline" in reward.notes.get("accuracy", "")


@pytest.mark.parametrize("kind", [kind for kind in ANSWER_KINDS if kind != "mathematics"])
def test_hostile_answers_of_every_other_kind_have_a_value(tmp_path: Path, settings: RewardSettings, kind: AnswerKind):
    canary = tmp_path / "canary"
    sample = make_sample(kind, GOLD[kind], ("A. red", "B. blue") if kind == "multiple_choice" else ())
    with Rewarder(settings) as rewarder:
        rewards = rewarder.score(
            [Response(sample, f"<answer>{answer}</answer>") for answer in answers(canary, NUM_ANSWERS)]
        )
        assert rewarder.pids == [], "nothing here needs a process"
    assert not canary.exists()
    assert all(0.0 <= reward.parts["accuracy"] <= 1.0 for reward in rewards)
