"""How Qwen2.5-Math's evaluation reads an answer from an output (``evaluation/parser.py``) and compares it with the gold
answer (``evaluation/grader.py``), its last step aside: there expressions are compared by math-verify, not by sympy's
parsers, which evaluate the text of an answer as Python.
"""

from __future__ import annotations

import re
from math import isclose

from vlm_pg.answers.published.checking import same_mathematics
from vlm_pg.answers.published.qwen_spelling import respelled

MAX_ANSWER = 2000  # characters; a longer answer is wrong
_NUMBER = re.compile(r"-?\d*\.?\d+")
_LINE_BREAK = re.compile(r"\n\s*+")
_LETTER = re.compile(r"\b(A|B|C|D|E)\b")
_LIST = re.compile(r"[(\[].+[)\]]")
_MATRIX = (r"\begin{pmatrix}", r"\end{pmatrix}")
_PERCENT = ("\\%", "%")


def read_answer(output: str) -> str:
    """The answer in an output, respelled; "" without one.

    In this order: between "final answer is $" and "$. I hope"; the last "boxed"; behind the last "he answer is" or
    "final answer is"; behind the first "答案是"; the last number.
    """
    output = output.replace("ки", "")
    if "final answer is $" in output and "$. I hope" in output:
        answer = output.split("final answer is $", 1)[1].split("$. I hope", 1)[0].strip()
    elif "boxed" in output:
        answer = _boxed(output.rpartition("boxed")[2])
    elif "he answer is" in output:
        answer = output.rpartition("he answer is")[2].strip()
    elif "final answer is" in output:
        answer = output.rpartition("final answer is")[2].strip()
    elif "答案是" in output:
        answer = output.split("答案是")[1].strip().split("\n\n")[0].strip()
    else:
        answer = last_number(output)
    answer = _LINE_BREAK.sub("", answer)
    answer = answer.removeprefix(":").removesuffix(".").removesuffix("/")
    # Twice, as published: what the first time leaves may be removed the second.
    return respelled(respelled(answer)) if len(answer) <= MAX_ANSWER else answer


def last_number(output: str) -> str:
    """The last match of the published ``-?\\d*\\.?\\d+`` in an output without its commas; "" without any."""
    last = ""
    for match in _NUMBER.finditer(output.replace(",", "")):
        last = match[0]
    return last


def is_right(answer: str, gold: str) -> tuple[bool, str]:
    """Whether a respelled answer is the respelled gold answer, and a note if that could not be said.

    Equal are: texts in any case; numbers within a relative 1e-4, the gold number's hundredth and hundredfold included;
    texts without brackets; lists and matrices of equal elements; equations of equal sides; equal expressions.
    """
    if len(answer) > MAX_ANSWER:
        return False, f"the answer is longer than {MAX_ANSWER} characters"
    if answer.strip().lower() == gold.strip().lower():
        return True, ""
    if len(gold) == 1 and gold in "ABCDE" and _chosen(answer) == gold:
        return True, ""
    number, gold_number = _number(answer), _number(gold)
    golds = () if gold_number is None else (gold_number / 100, gold_number, gold_number * 100)
    if number is not None and any(isclose(one, number, rel_tol=1e-4) for one in golds):
        return True, ""
    if not answer:
        return False, ""
    return _same_structure(answer.strip(), gold.strip())


def _same_structure(answer: str, gold: str) -> tuple[bool, str]:
    if "pmatrix" in answer and "pmatrix" not in gold:
        gold = ", ".join(
            _MATRIX[0] + one.strip("{}").replace(",", "\\") + _MATRIX[1] for one in re.findall(r"\{.*,.*\}", gold)
        )
    if _without_brackets(*_stripped(answer, gold)):
        return True, ""
    if _LIST.match(answer) and _LIST.match(gold):
        return _all_right(answer[1:-1].split(","), gold[1:-1].split(","))
    if _is_matrix(answer) and _is_matrix(gold):
        rows = [_cells(one) for one in (answer, gold)]
        if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
            return False, ""
        return _all_right(*([cell for row in side for cell in row] for side in rows))
    if answer.count("=") == 1 and gold.count("=") == 1:
        sides = [f"{left.strip()} - ({right.strip()})" for left, right in (one.split("=") for one in (answer, gold))]
        found = same_mathematics(sides[1], sides[0])
        return found if found[0] else same_mathematics(sides[1], f"-({sides[0]})")
    if _is_named(answer) and "=" not in gold:
        return is_right(answer.split("=")[1], gold)
    if _is_named(gold) and "=" not in answer:
        return is_right(answer, gold.split("=")[1])
    return same_mathematics(gold, answer)


def _stripped(answer: str, gold: str) -> tuple[str, str]:
    """Both without outer brackets where the answer has a pair and the gold answer has not the other kind."""
    pairs = (("[", "]", "(", ")"), ("(", ")", "[", "]"))
    if any(
        answer.startswith(left) and answer.endswith(right) and not (gold.startswith(other) and gold.endswith(closing))
        for left, right, other, closing in pairs
    ):
        return answer.strip("[]()"), gold.strip("[]()")
    return answer, gold


def _without_brackets(answer: str, gold: str) -> bool:
    gone = str.maketrans("", "", "{}()")
    return answer.translate(gone).lower() == gold.translate(gone).lower()


def _all_right(answers: list[str], golds: list[str]) -> tuple[bool, str]:
    if len(answers) != len(golds):
        return False, ""
    for answer, gold in zip(answers, golds, strict=True):
        right, note = is_right(answer, gold)
        if not right:
            return False, note
    return True, ""


def _is_matrix(text: str) -> bool:
    return text.startswith((_MATRIX[0], r"\begin{bmatrix}")) and text.endswith((_MATRIX[1], r"\end{bmatrix}"))


def _cells(matrix: str) -> list[list[str]]:
    rows = matrix[len(_MATRIX[0]) : -len(_MATRIX[1])].split("\\\\")
    return [row.strip().split("&") for row in rows if row.strip()]


def _is_named(text: str) -> bool:
    """Whether it is an equation such as "x = 5": at most two characters before its only sign of equality."""
    return text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2


def _boxed(rest: str) -> str:
    """What the braces behind "boxed" hold, to the end if they do not close; without braces what stands before a "$"."""
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    depth = 0
    for place, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[1:place]
    return rest[1:]


def _chosen(answer: str) -> str:
    cleaned = answer.strip("\n").rstrip(".").rstrip("/").strip(" ").lstrip(":")
    found = _LETTER.findall(cleaned.upper())
    return (found[-1] if found else cleaned.strip().strip(".")).rstrip(".").rstrip("/")


def _number(text: str) -> float | None:
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        for sign in _PERCENT:
            if text.endswith(sign):
                return _plain(text.removesuffix(sign))
    return None


def _plain(text: str) -> float | None:
    try:
        return float(text) / 100
    except ValueError:
        return None
