"""Parsed outputs: text outside thinking, the last answer tag or box, and no marks of chat templates."""

from __future__ import annotations

import pytest

from vlm_pg.answers.outputs import MAX_CHARACTERS, ParsedOutput, field_of_object, parse_output, without_formatting


@pytest.mark.parametrize(
    "output,text,final",
    [
        ("B", "B", None),
        ("<think>A</think> B", "B", None),
        ("A perhaps.\n</think>\n\nB", "B", None),
        ("<think>A</think><answer>B</answer>", "B", "B"),
        ("<think>A, so <answer>B</answer>", "B", "B"),
        ("<answer>B</answer><think>or A", "B", "B"),
        ("<answer>B", "B", "B"),
        ("B\n</answer>", "B", "B"),
        ("&lt;answer&gt;B&lt;/answer&gt;", "B", "B"),
        ("< answer > B < / answer >", "B", "B"),
        ("so $\\boxed{B}$.", "so $\\boxed{B}$.", "B"),
        ("<answer>It is \\boxed{\\text{B}}.</answer>", "It is \\boxed{\\text{B}}.", "\\text{B}"),
        ("<|begin_of_box|>B<|end_of_box|>", "B", "B"),
        ("assistant\nB<|im_end|>", "B", None),
        ("B<|im_end|>\n<|im_start|>user\nAnd A?", "B", None),
        ("B</s></s>", "B", None),
        ("B <!-- A -->", "B", None),
        ("B\n\nQuestion: What else?\nAnswer: A", "B", None),
        ("\\boxed{}", "\\boxed{}", ""),
    ],
)
def test_text_and_final_answer(output: str, text: str, final: str | None) -> None:
    parsed = parse_output(output, False)
    assert parsed is not None
    assert (parsed.text, parsed.final) == (text, final)


@pytest.mark.parametrize(
    "output", ["", " \n", "<think>A", "<think>A</think>", "<think><answer>B</answer> but", "<!-- B -->"]
)
def test_thinking_alone_says_nothing(output: str) -> None:
    assert parse_output(output, False) is None


def test_what_the_limit_left_open_is_no_final_answer() -> None:
    assert parse_output("<answer>12", True) == ParsedOutput("12", None, True)
    assert parse_output("\\boxed{12", True) == ParsedOutput("\\boxed{12", None, True)


def test_final_answers_side_by_side_are_told_apart_from_corrected_ones() -> None:
    beside = parse_output("<answer>A</answer> or <answer>B</answer>", False)
    corrected = parse_output("<answer>A</answer> Wait. <answer>B</answer> Yes.", False)
    rethought = parse_output("<answer>A</answer><think>no</think><answer>B</answer>", False)
    assert beside is not None and corrected is not None and rethought is not None
    assert (beside.final, beside.beside) == ("B", ("A",))
    assert (corrected.final, corrected.beside, corrected.after) == ("B", (), "Yes.")
    assert (rethought.final, rethought.beside) == ("B", ())


def test_markdown_and_latex_are_passed_over() -> None:
    assert without_formatting("**Ⓑ** $\\frac{A}{2}$ ~~C~~ $70^\\circ$") == "B A/2   70°"


def test_of_a_long_text_both_ends_are_kept() -> None:
    plain = without_formatting("first " + "x" * 3 * MAX_CHARACTERS + " last")
    assert plain.startswith("first") and plain.endswith("last") and len(plain) <= MAX_CHARACTERS + 2


def test_the_answer_of_an_object_is_its_answer_field() -> None:
    assert field_of_object('{"options": ["B"], "answer": "C"}') == "C"
    assert field_of_object('```json\n{"answer": [2, 5]}\n```') == "[2, 5]"
    assert field_of_object('{"label": "C"}') is None
    assert field_of_object('{"answer": ' * 1000) is None
