"""Generated answers to questions of every kind: spellings of the right one, and of wrong neighbours of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from vlm_pg.types import AnswerKind

_UNITS = ("cm", "m", "kg", "s", "mm", "g")
_NAMES = ("red car", "blue door", "New York", "Exit", "stop sign", "green tea", "Main Street", "north")
_HAN_NAMES = ("红色的车", "出口", "北京站", "向左转", "三只猫", "停车场")
_WIDE = {code: code + 0xFEE0 for code in range(ord("0"), ord("9") + 1)}
_WIDE |= {code: code + 0xFEE0 for first, last in ("AZ", "az") for code in range(ord(first), ord(last) + 1)}


@dataclass(frozen=True)
class Question:
    """A gold answer, texts that state it, and texts that state something else.

    ``wrong``: with what the kind's formula gives them; None: anything below 1.
    """

    kind: AnswerKind
    gold: str
    right: tuple[str, ...]
    wrong: Mapping[str, float | None]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """One answer to a question, and its accuracy (None: anything below 1)."""

    question: Question
    answer: str
    accuracy: float | None


def _wide(text: str) -> str:
    return text.translate(_WIDE)


# How models write any answer.
WRAPPINGS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "box": lambda text: f"\\boxed{{{text}}}",
    "box in formula": lambda text: f"$\\boxed{{{text}}}$",
    "box over lines": lambda text: f"\\[\n\\boxed{{\n  {text}\n}}\n\\]",
    "box, lines after the macro": lambda text: f"$$\n\\boxed\n{{\n{text}}}\n$$",
    "fbox": lambda text: f"\\fbox{{{text}}}",
    "nested boxes": lambda text: f"\\boxed{{\\boxed{{{text}}}}}",
    "bold box": lambda text: f"**\\boxed{{{text}}}**",
    "said": lambda text: f"The answer is \\boxed{{{text}}}.",
    "final": lambda text: f"Final answer: $\\boxed{{{text}}}$.",
    "full stop": lambda text: f"\\boxed{{{text}}}.",
    "said in Chinese": lambda text: f"答案是\\boxed{{{text}}}。",
    "Chinese, plain": lambda text: f"答案：{text}。",
    "Chinese, so": lambda text: f"所以，最终答案为：$\\boxed{{{text}}}$。",
    "said in bold": lambda text: f"The correct answer is: **{text}**",
    "heading": lambda text: f"### Final Answer\n\\boxed{{{text}}}",
    "reason before": lambda text: f"We look at it step by step.\n\n\\boxed{{{text}}}",
    "in a sentence": lambda text: f"So we get $\\boxed{{{text}}}$.",
    "in a Chinese sentence": lambda text: f"经过计算，我们得到\\boxed{{{text}}}。",
    "blank lines": lambda text: f"\n\n{text}\n",
}
# Those of texts that are no formulas, and of formulas.
TEXT_WRAPPINGS: dict[str, Callable[[str], str]] = {
    "text": lambda text: f"\\text{{{text}}}",
    "box, text": lambda text: f"\\boxed{{\\text{{{text}}}}}",
    "box, font": lambda text: f"\\boxed{{\\mathbf{{{text}}}}}",
    "box, upright": lambda text: f"$\\boxed{{\\mathrm{{ {text} }}}}$",
    "bold": lambda text: f"\\textbf{{{text}}}",
    "full width": _wide,
    "full width, box": lambda text: f"\\boxed{{{_wide(text)}}}",
}
FORMULA_WRAPPINGS: dict[str, Callable[[str], str]] = {
    "formula": lambda text: f"${text}$",
    "display": lambda text: f"\\[\n{text}\n\\]",
    "display in box": lambda text: f"\\boxed{{\\displaystyle {text}}}",
    "formula in box": lambda text: f"\\boxed{{${text}$}}",
    "dollars": lambda text: f"$$\n{text}\n$$",
}


def pairs(kind: AnswerKind, *, seed: int, num_questions: int, wrappings_of_an_answer: int) -> Iterator[Pair]:
    """Each right and wrong text of a kind's questions, plain and in some wrappings; the same for a seed."""
    for number in range(num_questions):
        rng = random.Random(f"{seed} {kind} {number}")
        question = _MAKERS[kind](rng, number)
        for text, accuracy in {**question.wrong, **dict.fromkeys(question.right, 1.0)}.items():
            allowed = WRAPPINGS | (FORMULA_WRAPPINGS if "\\" in text else TEXT_WRAPPINGS)
            for name in ("plain", *rng.sample(sorted(allowed.keys() - {"plain"}), wrappings_of_an_answer)):
                yield Pair(question, allowed[name](text).strip(), accuracy)


def _distinct(rng: random.Random, count: int, low: int = 2, high: int = 40) -> list[int]:
    return rng.sample(range(low, high), count)


def _formula(rng: random.Random, number: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A formula, other spellings of it, and its neighbours: another sign, order, digit, root or unit."""
    a, b, c = _distinct(rng, 3)
    unit, other = rng.sample(_UNITS, 2)
    low, high = sorted((a, b))
    made: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        (
            f"\\frac{{{a}}}{{{b}}}",
            (f"\\dfrac{{{a}}}{{{b}}}", f"\\frac {{ {a} }} {{ {b} }}"),
            (f"-\\frac{{{a}}}{{{b}}}", f"\\frac{{{b}}}{{{a}}}", f"\\frac{{{a}}}{{{b + 1}}}"),
        ),
        (
            f"{a}\\sqrt{{{b}}}",
            (f"{a} \\sqrt {{ {b} }}", f"{a}\\,\\sqrt{{{b}}}"),
            (f"{a}\\sqrt{{{b + 1}}}", f"-{a}\\sqrt{{{b}}}", f"{b}\\sqrt{{{a}}}", f"{a}\\sqrt[3]{{{b}}}", f"{a}"),
        ),
        (
            f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}",
            (f"\\dfrac{{{a}\\sqrt{{{b}}}}}{{{c}}}",),
            (f"\\frac{{{a}\\sqrt{{{c}}}}}{{{b}}}", f"\\frac{{-{a}\\sqrt{{{b}}}}}{{{c}}}"),
        ),
        (f"{a}\\pi", (f"{a} \\pi",), (f"{a + 1}\\pi", f"-{a}\\pi", f"{a}", f"\\frac{{{a}}}{{\\pi}}")),
        (f"{a}^{{{b}}}", (f"{a} ^ {{ {b} }}",), (f"{b}^{{{a}}}", f"{a}^{{-{b}}}", f"{a}{b}")),
        (f"({a}, {b})", (f"\\left({a}, {b}\\right)", f"({a},{b})"), (f"({b}, {a})", f"(-{a}, {b})", f"({a}, {b + 1})")),
        (f"{a}^\\circ", (f"{a}^{{\\circ}}",), (f"{a + 1}^\\circ", f"-{a}^\\circ")),
        (
            f"{a}\\text{{ {unit}}}",
            (f"{a}\\,\\mathrm{{{unit}}}", f"{a} {unit}"),
            (f"{a + 1}\\text{{ {unit}}}", f"{a}\\text{{ {other}}}", f"-{a}\\text{{ {unit}}}"),
        ),
        (
            f"{a}^\\circ\\text{{C}}",
            (f"{a}°C", f"{a} °C", f"{a}^{{\\circ}}\\mathrm{{C}}"),
            (f"{a + 1}^\\circ\\text{{C}}", f"{a}^\\circ\\text{{F}}", f"-{a} °C", f"{a} A"),
        ),
        (f"-{a}", (f"\u2212{a}",), (f"{a}", f"-{a}{b % 10}", f"-{a + 1}")),
        (f"{a}:{b}", (f"{a} : {b}",), (f"{b}:{a}", f"{a}:{b + 1}", f"-{a}:{b}")),
        (f"[{low}, {high})", (f"\\left[{low}, {high}\\right)",), (f"({low}, {high}]", f"[{low}, {high}]")),
        (f"x^2+{a}x-{b}", (f"x^{{2}} + {a}x - {b}",), (f"x^2-{a}x-{b}", f"x^2+{a}x+{b}", f"x^2+{b}x-{a}")),
        (f"{a}.{b}", (), (f"{b}.{a}", f"-{a}.{b}", f"{a}{b}", f"{a}.{b}1")),
        (f"{a}\\%", (f"{a}%",), (f"{a + 1}\\%", f"-{a}\\%")),
        (f"€{a}", (f"€ {a}",), (f"£{a}", f"¥{a}", f"€{a + 1}", f"-€{a}")),
        (f"Co{a}", (), (f"CO{a}", f"Co{b}", f"Cu{a}")),
        (f"\\Delta_{{{a}}}", (), (f"\\delta_{{{a}}}", f"\\Delta_{{{b}}}", "\\Delta")),
        (f"X^{{{a}}}Y", (f"X ^ {{ {a} }} Y",), (f"x^{{{a}}}Y", f"X^{{{a}}}y", f"X_{{{a}}}Y")),
    ]
    return made[number % len(made)]


def _multiple_choice(rng: random.Random, number: int) -> Question:
    """Options that are formulas and their neighbours, or texts; the answer is a letter, a text or both."""
    if number % 3 == 0:
        text, *others = rng.sample(_NAMES if number % 2 else _HAN_NAMES, 4)
        spellings: tuple[str, ...] = ()
    else:
        text, spellings, neighbours = _formula(rng, number)
        others = list(neighbours)[:3]
    index = rng.randrange(len(others) + 1)
    texts = [*others[:index], text, *others[index:]]
    letters = "ABCDEF"[: len(texts)]
    options = tuple(f"{letter}. {one}" for letter, one in zip(letters, texts, strict=True))
    letter = letters[index]
    right = [letter, f"{letter}. {text}", f"({letter})", f"选项{letter}", text, *spellings]
    right += [f"x = {text}"] if text[-1].isdigit() and text[0].isdigit() else []
    wrong = [one for other, option in zip(letters, texts, strict=True) if other != letter for one in (other, option)]
    wrong += [f"{other}. {option}" for other, option in zip(letters, texts, strict=True) if other != letter][:1]
    wrong += [f"{letter}. {others[0]}"]
    return Question("multiple_choice", letter, tuple(right), dict.fromkeys(wrong, 0.0), options)


def _multiple_select(rng: random.Random, number: int) -> Question:
    options = tuple(f"{letter}. {one}" for letter, one in zip("ABCD", rng.sample(_NAMES, 4), strict=True))
    chosen = sorted(rng.sample("ABCD", rng.choice((2, 3))))
    right: tuple[str, ...] = (", ".join(chosen), "".join(chosen), "、".join(chosen), "和".join(chosen))
    other = next(letter for letter in "ABCD" if letter not in chosen)
    wrong = (", ".join(chosen[1:]), "、".join([*chosen, other]), ", ".join([other, *chosen[1:]]), chosen[0])
    right += (" and ".join(chosen), f"\\{{{', '.join(chosen)}\\}}")
    with_texts = "\n".join(option for option in options if option[0] in chosen)
    return Question("multiple_select", ", ".join(chosen), (*right, with_texts), dict.fromkeys(wrong, 0.0), options)


def _number(rng: random.Random, number: int, kind: AnswerKind) -> Question:
    """A number, and wrong texts with the number they state: none for another unit, or for a formula."""
    a, b, c = _distinct(rng, 3, 11, 90)
    d = c % 10
    unit, other = ("cm", "kg") if number % 2 else ("s", "m")
    shapes: list[tuple[str, tuple[str, ...], dict[str, float | None]]] = [
        (
            f"{a}.{b}",
            (f"+{a}.{b}", f"约{a}.{b}", f"$x={a}.{b}$"),
            {f"-{a}.{b}": -float(f"{a}.{b}"), f"{b}.{a}": float(f"{b}.{a}"), f"{a}{b}": float(f"{a}{b}")},
        ),
        (
            f"-{a}",
            (f"\u2212{a}", f"负{a}", f"minus {a}"),
            {f"{a}": a, f"-{a + 1}": -a - 1, f"-{a}{d}": -float(f"{a}{d}")},
        ),
        (
            f"{a} {unit}",
            (f"{a}\\text{{ {unit}}}", f"{a}\\,\\mathrm{{{unit}}}", f"{a}{unit}", f"{a}"),
            {f"{a} {other}": None, f"{a}\\text{{ {other}}}": None, f"{a}\\,\\mathrm{{{other}}}": None},
        ),
        (
            f"{a}/{b}",
            (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}"),
            {
                f"\\frac{{{b}}}{{{a}}}": b / a,
                f"-\\frac{{{a}}}{{{b}}}": -a / b,
                f"\\frac{{{a + 1}}}{{{b}}}": (a + 1) / b,
            },
        ),
        (
            f"{a},{b}{d}",
            (f"{a}{b}{d}", f"{a}{{,}}{b}{d}", f"{a}\\,{b}{d}"),
            {f"{a}.{b}{d}": float(f"{a}.{b}{d}"), f"-{a}{b}{d}": -float(f"{a}{b}{d}")},
        ),
        (f"{a}%", (f"{a}\\%", f"百分之{a}"), {f"-{a}%": -a, f"{a + 1}\\%": a + 1}),
        (
            f"{a}",
            (f"共{a}个", f"n = {a}"),
            dict.fromkeys((f"\\sqrt{{{a}}}", f"{a}\\pi", f"{a}\\sqrt{{2}}", f"\\frac{{{a}}}{{\\sqrt{{3}}}}"))
            | {f"{a}{b}": float(f"{a}{b}"), f"{a}^2": float(a * a), f"\\frac{{1}}{{{a}}}": 1 / a},
        ),
    ]
    gold, right, wrong = shapes[number % len(shapes)]
    value = a / b if "/" in gold else float(gold.split()[0].replace(",", "").rstrip("%"))
    return Question(kind, gold, (gold, *right), {text: _credit(kind, stated, value) for text, stated in wrong.items()})


def _credit(kind: AnswerKind, stated: float | None, gold: float) -> float:
    """What the kind's formula gives for a number that is not the gold one."""
    if stated is None or kind == "numerical":
        return 0.0
    error = abs(stated - gold) / abs(gold)
    if kind == "regression":
        return 1.0 - min(1.0, error)
    return sum(error < 1 - Fraction(percent, 100) for percent in range(50, 100, 5)) / 10


def _ocr(rng: random.Random, number: int) -> Question:
    first, second = rng.sample(_HAN_NAMES if number % 2 else _NAMES, 2)
    a, b = _distinct(rng, 2)
    text = f"{first} {a}, {second}"
    wrong = (
        f"{first} {b}, {second}",
        f"{second} {a}, {first}",
        f"{first} -{a}, {second}",
        f"{first} {a}, {second} {b}",
    )
    return Question("ocr", text, (text, f"{first}\n{a}, {second}"), dict.fromkeys(wrong))


def _free_form(rng: random.Random, number: int) -> Question:
    first, second = rng.sample(_HAN_NAMES if number % 2 else _NAMES, 2)
    a, b = _distinct(rng, 2)
    text = f"{first} {a} {second}"
    wrong = (f"{first} {b} {second}", f"{second} {a} {first}", f"{first} {second}")
    return Question("free_form", text, (text,), dict.fromkeys(wrong))


def _box(rng: random.Random, number: int) -> Question:
    x1, y1, x2, y2 = (value for pair in (_distinct(rng, 2), _distinct(rng, 2, 50, 90)) for value in pair)
    right = (
        f"[{x1}, {y1}, {x2}, {y2}]",
        f"({x1}, {y1}), ({x2}, {y2})",
        f'{{"bbox_2d": [{x1}, {y1}, {x2}, {y2}]}}',
        f'{{\n  "bbox_2d": [\n    {x1},\n    {y1},\n    {x2},\n    {y2}\n  ]\n}}',
        f'{{\n    "x1": {x1},\n    "y1": {y1},\n    "x2": {x2},\n    "y2": {y2}\n}}',
        f"\\left({x1}, {y1}\\right), \\left({x2}, {y2}\\right)",
        f"[{x1}，{y1}，{x2}，{y2}]",
        f"左上角({x1},{y1})，右下角({x2},{y2})",
        f"({x1}, {y1}) 和 ({x2}, {y2})",
    )
    wrong = {
        f"[-{x1}, {y1}, {x2}, {y2}]": (x2 - x1) / (x2 + x1),
        f"[{x1}, {y1}, {x2}, {y2 + 1}]": (y2 - y1) / (y2 + 1 - y1),
        f"[{x2}, {y1}, {x1}, {y2}]": 0.0,
        f"[{y1}, {x1}, {y2}, {x2}]": None,
        f"[{x1}, {y1}, {x2}]": 0.0,
        f'{{"bbox_2d": [{x1}, {y1}, {x2 + 10}, {y2}]}}': (x2 - x1) / (x2 + 10 - x1),
    }
    return Question("box", right[number % 2], right, wrong)


def _time_span(rng: random.Random, number: int) -> Question:
    start, end = sorted(_distinct(rng, 2, 10, 59))
    right = (
        f"[{start}, {end}]",
        f"{start} - {end} s",
        f"from 0:{start} to 0:{end}",
        f"{start}秒到{end}秒",
        f"第{start}秒至第{end}秒",
        f"{start}\\text{{ s}} - {end}\\text{{ s}}",
        f'{{\n  "start": {start},\n  "end": {end}\n}}',
        f"\\left[{start}, {end}\\right]",
        f"{start}\\text{{s}} \\sim {end}\\text{{s}}",
        f"开始：{start}秒，结束：{end}秒",
    )
    length = end - start
    wrong = {
        f"[{end}, {start}]": 0.0,
        f"[{start}, {end + 1}]": length / (length + 1),
        f"{start} - {end} min": 0.0 if 60 * start >= end else None,
        f"[-{start}, {end}]": length / (start + end),
        f"{start} s": 0.0,
        f"从{start}秒到{end + 9}秒": length / (length + 9),
    }
    return Question("time_span", right[number % 2], right, wrong)


def _exact(rng: random.Random, number: int) -> Question:
    if number % 3 == 0:
        text, *others = rng.sample(_HAN_NAMES if number % 2 else _NAMES, 3)
        return Question("exact", text, (text,), dict.fromkeys(others, 0.0))
    text, spellings, neighbours = _formula(rng, number)
    return Question("exact", text, (text, *spellings), dict.fromkeys(neighbours, 0.0))


def _yes_no(rng: random.Random, number: int) -> Question:
    yes = ("Yes", "yes", "True", "是", "是的", "对", "正确")
    no = ("No", "no", "False", "否", "不是", "不对", "错误")
    right, wrong = (yes, no) if number % 2 else (no, yes)
    return Question("yes_no", rng.choice(right), right, dict.fromkeys(wrong, 0.0))


def _mathematics(rng: random.Random, number: int) -> Question:
    text, spellings, neighbours = _formula(rng, number)
    return Question("mathematics", text, (text, *spellings), dict.fromkeys(neighbours, 0.0))


_MAKERS: dict[AnswerKind, Callable[[random.Random, int], Question]] = {
    "multiple_choice": _multiple_choice,
    "multiple_select": _multiple_select,
    "numerical": lambda rng, number: _number(rng, number, "numerical"),
    "regression": lambda rng, number: _number(rng, number, "regression"),
    "mean_relative_accuracy": lambda rng, number: _number(rng, number, "mean_relative_accuracy"),
    "ocr": _ocr,
    "free_form": _free_form,
    "box": _box,
    "time_span": _time_span,
    "exact": _exact,
    "yes_no": _yes_no,
    "mathematics": _mathematics,
}
