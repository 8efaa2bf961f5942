"""How Qwen2.5-Math's evaluation respells answers before it compares them (``strip_string`` in its
``evaluation/parser.py``).

Its steps are kept, and their order, since each sees what those before it left: with units gone a word may be a number,
with "and" gone a word may be another. What the published steps do not do though they seem to is left out.

How Qwen2.5-Math's evaluation reads an answer from an output (``evaluation/parser.py``) and compares it with the gold
answer (``evaluation/grader.py``), its last step aside: there expressions are compared by math-verify, not by sympy's
parsers, which evaluate the text of an answer as Python.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from math import isclose

from vlm_pg.answers.numbers import ONES, TENS
from vlm_pg.answers.published.checking import same_mathematics

# Removed where they stand between signs that belong to no word, one after another, twice; then the same with an "s".
# fmt: off
_UNITS = (
    "east", "degree", "mph", "kmph", "ft", "m sqaure", " m east", "sq m", "deg", "mile", "q .", "monkey", "prime",
    "ratio", "profit of rs", "rd", "o", "gm", "p . m", "lb", "tile", "per", "dm", "lt", "gain", "ab", "way", "west",
    "a .", "b .", "c .", "d .", "e .", "f .", "g .", "h .", "t", "a", "h", "no change", "men", "soldier", "pie", "bc",
    "excess", "st", "inches", "noon", "percent", "by", "gal", "kmh", "c", "acre", "rise", "a . m", "th", "π r 2", "sq",
    "mark", "l", "toy", "coin", "sq . m", "gallon", "° f", "profit", "minw", "yr", "women", "feet", "am", "pm", "hr",
    "cu cm", "square", "v â € ™", "are", "rupee", "rounds", "cubic", "cc", "mtr", "s", "ohm", "number", "kmph", "day",
    "hour", "minute", "min", "second", "man", "woman", "sec", "cube", "mt", "sq inch", "mp", "∏ cm ³", "hectare",
    "more", "sec", "unit", "cu . m", "cm 2", "rs .", "rs", "kg", "g", "month", "km", "m", "cm", "mm", "apple", "liter",
    "loss", "yard", "pure", "year", "increase", "decrease", "d", "less", "Surface", "litre", "pi sq m", "s .", "metre",
    "meter", "inch",
)
# fmt: on
_FIRST = (
    *(("\\!", ""), ("\\end{array}", "\\end{pmatrix}"), ("bmatrix", "pmatrix"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\neq", "\\ne"), ("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\left", ""), ("\\right", "")),
    *(("\\{", "{"), ("\\}", "}")),
)
_MARKS = ("^{\\circ}", "^\\circ", "\\$", "$", "\\(", "\\)")
_NAMES = ("x=", "y=", "z=", "x\\in", "y\\in", "z\\in", "x\\to", "y\\to", "z\\to")
_ARRAY = re.compile(r"\\begin\{array\}\{.*?\}")
_LAST_TEXT = re.compile(r"\\text{.*?}$")
_TEXT = re.compile(r"\\text\{(.*?)\}")
_BOX = re.compile(r"\\mbox{.*?}")
_ZEROS = (re.compile(r"(\d+)\.0*([^\d])"), re.compile(r"(\d+)\.0*$"))
_ROOT = re.compile(r"\\sqrt(\w+)")
_LARGE = {"billion": 10**9, "million": 10**6, "thousand": 1000}
_WORDS = (
    {word: value for value, word in enumerate(ONES)}
    | {word: 10 * value for value, word in enumerate(TENS, 2)}
    | {"hundred": 100}
    | _LARGE
)


def respelled(text: str) -> str:
    """The text as it is compared: "\\\\dfrac12 cm" -> "\\\\frac{1}{2}", "x=5.0" -> "5", "five apples" -> "5".

    Takes time in the square of the text's length: callers limit it.
    """
    text = text.strip().replace("\n", "").rstrip(".")
    text = _ARRAY.sub(r"\\begin{pmatrix}", text)
    for old, new in _FIRST:
        text = text.replace(old, new)
    text = _LAST_TEXT.sub("", text).strip() or text
    text = _without_units(text)
    for mark in _MARKS:
        text = text.replace(mark, "")
    text = _TEXT.sub(r"\1", _number_of_words(text))
    for name in _NAMES:
        text = text.replace(name, "")
    text = text.replace("\\emptyset", "{}").replace("(-\\infty,\\infty)", "\\mathbb{R}")
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = text.replace("infinity", "\\infty")
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _BOX.sub("", text.replace("+\\inity", "\\infty").replace("and", "").replace("\\mathbf", ""))
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZEROS[1].sub(r"\1", _ZEROS[0].sub(r"\1\2", text))
    if text.startswith("."):
        text = f"0{text}"
    left, sign, right = text.partition("=")
    if sign and "=" not in right and len(left) <= 2:
        text = right
    return _slash_as_fraction(_braced_fractions(_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")))


@lru_cache(maxsize=1)
def _unit_patterns() -> tuple[re.Pattern[str], ...]:
    names = [*_UNITS, *(f"{unit}s" for unit in _UNITS)]
    return tuple(re.compile(rf"(^|\W){name}($|\W)") for name in names)


def _without_units(text: str) -> str:
    for pattern in _unit_patterns() * 2:
        text = pattern.sub(r"\1\2", text) or text
    return text


def _number_of_words(text: str) -> str:
    """The number that the number words in a text make, whatever else stands there; the text if it has none.

    As the package word2number has it. _number_of_words("five apples") == "5"
    """
    spaced = text.replace("-", " ").lower()
    if spaced.isdecimal():
        return str(int(spaced)) if len(spaced) <= 1000 else text
    words = [word for word in spaced.split() if word in _WORDS or word == "point"]
    if not words or words.count("point") > 1:
        return text
    decimals: list[str] = []
    if "point" in words:
        point = words.index("point")
        words, decimals = words[:point], words[point + 1 :]
    whole = _whole_number(words)
    return text if whole is None else str(whole + _decimals(decimals) if decimals else whole)


def _whole_number(words: list[str]) -> int | None:
    """0 of no words; None of more than one of a scale, of a smaller one first, and of too many words."""
    scales = [word for word in words if word in _LARGE]
    if scales != [word for word in _LARGE if word in scales]:
        return None
    if len(words) == 1:
        return _WORDS[words[0]]
    total = 0
    for scale in scales:
        index = words.index(scale)
        value = _below_thousand(words[:index])
        if value is None:
            return None
        total, words = total + value * _LARGE[scale], words[index + 1 :]
    rest = _below_thousand(words) if words else 0
    return None if rest is None else total + rest


def _decimals(words: list[str]) -> float:
    """What the words behind "point" make, each of one digit; 0 if one is not."""
    digits = [ONES.index(word) if word in ONES[:10] else -1 for word in words]
    return 0 if -1 in digits else float("0." + "".join(map(str, digits)))


def _below_thousand(words: list[str]) -> int | None:
    values = [_WORDS[word] for word in words]
    if len(values) in (3, 4):
        return values[0] * values[1] + sum(values[2:])
    if len(values) == 2:
        return values[0] * values[1] if 100 in values else sum(values)
    return values[0] if values else None


def _braced_fractions(text: str) -> str:
    """ "\\\\frac12" and "\\\\frac1{72}" with braces around both parts; the text as it was if one lacks a part."""
    first, *rest = text.split("\\frac")
    parts = [first]
    for part in rest:
        if part.startswith("{"):
            parts.append(part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            parts.append(f"{{{part[0]}}}{part[1:]}")
        else:
            parts.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return "\\frac".join(parts)


def _slash_as_fraction(text: str) -> str:
    """ "3/4" as "\\\\frac{3}{4}", of whole numbers and roots alone."""
    parts = text.split("/")
    if len(parts) != 2 or not all("sqrt" in part or _is_whole(part) for part in parts):
        return text
    return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?(?:0|[1-9][0-9]{0,999})", text) is not None and text != "-0"


MAX_ANSWER = 2000  # characters; a longer answer is wrong
_NUMBER = re.compile(r"-?\d*\.?\d+")
_LINE_BREAK = re.compile(r"\n\s*+")
_LETTER = re.compile(r"\b(A|B|C|D|E)\b")
_LIST = re.compile(r"[(\[].+[)\]]")
_MATRIX = (r"\begin{pmatrix}", r"\end{pmatrix}")


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
    numbers = _NUMBER.findall(output.replace(",", ""))
    return numbers[-1] if numbers else ""


def is_right(answer: str, gold: str) -> tuple[bool, str]:
    """Whether a respelled answer is the respelled gold answer, and a note if that could not be decided.

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
    for index, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[1:index]
    return rest[1:]


def _chosen(answer: str) -> str:
    cleaned = answer.strip("\n").rstrip(".").rstrip("/").strip(" ").lstrip(":")
    found = _LETTER.findall(cleaned.upper())
    return (found[-1] if found else cleaned.strip().strip(".")).rstrip(".").rstrip("/")


def _number(text: str) -> float | None:
    text = text.replace(",", "")
    for suffix, divisor in (("", 1), ("\\%", 100), ("%", 100)):
        if text.endswith(suffix):
            with suppress(ValueError):
                return float(text.removesuffix(suffix)) / divisor
    return None
