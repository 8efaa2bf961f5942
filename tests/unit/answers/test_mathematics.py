"""Mathematics: equal answers in any spelling are right, unusable gold has no value, and no text is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.answers.helpers import make_sample
from vlm_pg.answers import mathematics
from vlm_pg.answers.grading import mathematics_verdict
from vlm_pg.answers.latex import statement, words
from vlm_pg.answers.mathematics import MAX_CHARACTERS, compare, refusal
from vlm_pg.answers.pool import Outcome
from vlm_pg.rewards.rewarder import Rewarder, gold_faults


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """As in a checking process."""
    mathematics.prepare()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "The answer is $5$."),
        ("5", "\\boxed{5}"),
        ("5", "x = 5"),
        ("x=5", "5"),
        ("5", "5 cm"),
        ("5\\text{ cm}", "5"),
        ("18", "$18"),
        ("10,\\!080", "10080"),
        ("\\frac{1}{2}", "1/2"),
        ("\\frac12", "0.5"),
        ("\\frac{1}{2}", "½"),
        ("50\\%", "50%"),
        ("50\\%", "0.5"),
        ("\\sqrt{2}", "sqrt(2)"),
        ("\\sqrt{2}", "√2"),
        ("x^2", "x²"),
        ("8", "2**3"),
        ("1500", "1.5e3"),
        ("2\\pi", "2π"),
        ("-5", "−5"),
        ("-5", "-$5$"),
        ("(3,4]", "\\(\\left(3, 4\\right]\\)"),
        ("\\{1,2,3\\}", "\\{3,2,1\\}"),
        ("1,2", "2 and 1"),
        ("(x+1)^2", "x^2+2x+1"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("y=2x+1", "2x+1=y"),
        ("x<3", "3 > x"),
        ("\\text{east}", "East"),
        ("\\text{(C)}", "C"),
        ("no solution", "No solution."),
        ("2^{100}", "1267650600228229401496703205376"),
        ("0", "1-1"),
        ("1-1", "0"),
        ("0", "0.0"),
        ("0", "\\sin(\\pi)"),
        ("0", "\\sqrt{8}-2\\sqrt{2}"),
        ("0", "x-x"),
        ("5", "\\boxed{\n\\textbf{5}\n}"),
        ("-5", "$-\\boxed{5}$"),
        ("5\\text{ cm}", "\\boxed{5} cm."),
        ("(1,2)", "\\boxed{\\text{(1, 2)}}"),
        ("\\frac{\\sqrt{3}}{2}", "\\fbox{\\boxed{\\frac{\\sqrt{3}}{2}}}"),
    ],
)
def test_equal_answers(gold: str, answer: str):
    assert compare(gold, answer) == (1.0, "")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "6"),
        ("5", "5 or 7"),
        ("5", "$5$ or $7$"),
        ("5", "\\boxed{5} \\boxed{7}"),
        ("5", "$5 or $7"),
        ("5", "-$5$"),
        ("(3,4]", "(3,4)"),
        ("(1,2)", "(2,1)"),
        ("\\{1,2,3\\}", "\\{1,2\\}"),
        ("x^2+1", "x^2+2"),
        ("x<3", "x\\le 3"),
        ("\\text{east}", "seat"),
        ("\\text{(C)}", "B"),
        ("1/3", "0.33"),
        ("y=2x+1", "y=2x+2"),
        ("5", ""),
        ("0", "10^{-400}"),
        ("2^{100}-1", "2^{100}"),
        ("1125899906842623", "1125899906842624"),
        ("1-\\frac{1}{2^{50}}", "1"),
        ("10^{-400}", "0"),
        ("0", "e^{-900}"),
        ("0", "10^{-9}"),
        ("6.6*10^{-34}", "6.6*10^{-35}"),
        ("5", "-\\boxed{5}"),
        ("5\\text{ cm}", "\\boxed{5} kg"),
    ],
)
def test_other_answers_are_wrong(gold: str, answer: str):
    assert compare(gold, answer)[0] == 0.0


@pytest.mark.parametrize("gold", ["", "??", "\\frac{1}", "9" * 500, "\\int_0^1 x dx", "9^{9^{9^{9}}}"])
@pytest.mark.parametrize("answer", ["5", "", "no text"])
def test_unusable_gold_has_no_value_whatever_the_answer(gold: str, answer: str):
    value, note = compare(gold, answer)
    assert value is None
    assert note.startswith("gold answer") and "cannot be used" in note


@pytest.mark.parametrize(
    "gold",
    [
        "It is increasing. It is bounded.",
        "The lines are parallel. They have no common points.",
        "Yes. The function is continuous at $x=0$ since the limit exists.",
        "三角形是等腰的。底角相等。",
    ],
)
def test_gold_of_several_sentences_has_no_value(gold: str):
    for answer in (gold, "bounded", "0"):
        value, note = compare(gold, answer)
        assert value is None
        assert "several sentences; give the answer alone, or in \\boxed{}" in note


def test_the_check_of_gold_answers_says_what_to_do_about_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rewarder, "_run", lambda self, calls, _: [Outcome(compare(*call.arguments)) for call in calls])
    first, second = gold_faults([make_sample("mathematics", gold) for gold in ("It is even. It is bounded.", "even")])
    assert first is not None and "several sentences; give the answer alone" in str(first)
    assert second is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("答案是5。因为2+3=5。", "5"),
        ("We add the two sides. So we get \\boxed{5}.", "5"),
        ("It is increasing.", "increasing"),
    ],
)
def test_gold_that_says_which_is_the_answer_is_read(gold: str, answer: str):
    assert compare(gold, answer) == (1.0, "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9^{9^{9^{9}}}", "more than 3000 digits"),
        ("2**(9**9)", "more than 3000 digits"),
        ("e^{e^{e^{9}}}", "more than 3000 digits"),
        ("100000000!", "factorial"),
        ("((5!)!)!", "factorial"),
        ("(x+y)^{1000}", "sum to a power"),
        ("\\begin{pmatrix}1&2\\\\3&e\\end{pmatrix}^{1000}", "a matrix to a power other than a whole number up to"),
        ("\\sin(10^{100})", "more than 20 digits"),
        # The ends of an interval would be compared while it is read.
        ("[\\sin(10^{99999999}), 1]", "more than 3000 digits"),
        ("[10^{-1000000000}, 1]", "more than 3000 digits"),
        ("(1, 2) \\cup (3, 9^{9^{9}}]", "more than 3000 digits"),
        ("\\sum_{n=1}^{9} n", "\\sum is not something a final answer is written with"),
        ("\\binom{1000000}{5}", "binomial"),
        ("(" * 20 + "1" + ")" * 20, "nested brackets"),
        ("1" * 100, "digits in a row"),
        ("1+" * MAX_CHARACTERS, f"more than {MAX_CHARACTERS} characters"),
        ("1+" * 40 + "1", "operators"),
        ("\x005", "characters that mathematics is not written with"),
        ("\\begin{tikzpicture}x\\end{tikzpicture}", "environment"),
    ],
)
def test_what_would_take_long_is_refused_and_says_why(answer: str, reason: str):
    value, note = compare("5", answer)
    assert value == 0.0
    assert reason in note


def test_numbers_are_read_without_evaluation(tmp_path: Path):
    """sympy's own way from a string to a number is ``eval``; here everything but a plain number raises."""
    import sympy

    canary = tmp_path / "canary"
    with mathematics.without_evaluation():
        assert sympy.sympify("12") == 12
        assert sympy.sympify("0.5") == 0.5
        with pytest.raises(ValueError):
            sympy.sympify(f"open({str(canary)!r}, 'w')")
    assert not canary.exists()


def test_the_parser_is_replaced_during_a_comparison_and_at_no_other_time(monkeypatch: pytest.MonkeyPatch):
    """Users' functions run in the same processes: to them sympy is as it is."""
    import sympy
    from sympy.parsing import sympy_parser

    original = sympy_parser.eval_expr
    seen = []
    monkeypatch.setattr(mathematics, "equal", lambda gold, found: seen.append(sympy_parser.eval_expr) or True)
    assert compare("1/2", "0.5") == (1.0, "")
    assert seen == [mathematics._number_without_evaluation]
    monkeypatch.setattr(mathematics, "equal", lambda gold, found: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare("1/2", "0.5")
    assert sympy_parser.eval_expr is original and sympy.sympify("1/2 + 1/2") == 1


@pytest.mark.parametrize("function", ["grader.sympy_expr_eq", "parser.latex2sympy"])
@pytest.mark.parametrize("error", [MemoryError, RecursionError, KeyError])
def test_what_ran_out_is_not_the_answers_fault(
    monkeypatch: pytest.MonkeyPatch, function: str, error: type[Exception]
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(f"math_verify.{function}", fail)
    mathematics._parse.cache_clear()
    if function.startswith("grader"):
        gold, answer = "x^2+3x+1", "x(x+3)+1"
    else:
        gold, answer = "\\text{east}", "x(x+7)+1"
        monkeypatch.setattr(mathematics, "words", lambda latex, gold: None)
        monkeypatch.setattr(mathematics, "_parse", _only_answers(mathematics._parse))
    if error is KeyError:
        assert compare(gold, answer)[0] == 0.0
    else:
        with pytest.raises(error):
            compare(gold, answer)


def _only_answers(parse: Any) -> Any:
    return lambda latex: 5 if "east" in latex else parse(latex)


def test_a_stopped_check_has_no_value():
    verdict = mathematics_verdict(Outcome(problem="deadline: it took longer than 1 s and was stopped"))
    assert verdict.value is None
    assert verdict.note.startswith("not checked: deadline")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The final answer is: **7**.", "7"),
        ("so, the answer is $x=7$", "x=7"),
        ("\\boxed{a{b}c} and \\boxed{2}", "a{b}c, 2"),
        ("costs $5 and $6 more", "costs \\$5 and \\$6 more"),
        ("\\boxed{7", "7"),
        ("5 $\\pm$ 1", "5 \\pm 1"),
    ],
)
def test_what_a_text_states(text: str, expected: str):
    assert statement(text) == expected


def test_words_and_products_of_letters():
    assert words("\\text{ab}", gold=True) == "ab"
    assert words("xyz", gold=True) is None
    assert words("xyz", gold=False) == "xyz"
    assert words("2 cm", gold=True) is None
    assert refusal("xyz") is None
