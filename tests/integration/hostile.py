"""Hostile answers from a seeded generator, and the function that grades one of them in a checking process.

Every text is built from a family below: code for whatever evaluates it, numbers that explode, nesting, megabytes, bait
for regular expressions that backtrack, tricks of Unicode, and gold answers that were broken in positions.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlm_pg.answers.grading import CHECKERS
from vlm_pg.answers.mathematics import compare
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind, Sample

GOLD: dict[AnswerKind, tuple[str, ...]] = {
    "multiple_choice": ("B", "B. blue"),
    "multiple_select": ("A, C", "none"),
    "numerical": ("5", "-0.001", "1.5 m", "50%"),
    "ocr": ("open the door", "出口在左边"),
    "free_form": ("a person flips a pancake", "一只猫坐在垫子上"),
    "regression": ("12.5", "3 km/h"),
    "mean_relative_accuracy": ("12.5", "10 m^2"),
    "box": ("[1, 2, 30, 40]",),
    "time_span": ("[1.5, 3]", "0:12 - 1:05"),
    "exact": ("a red car", "150 µV"),
    "yes_no": ("yes", "no"),
    "mathematics": (
        *(
            "5",
            r"\frac{\sqrt{3}}{2}",
            "x^2+2x+1",
            r"\{1, 2, 3\}",
            "(3, 4]",
            "y = 2x + 1",
            "x < 3",
            "2^{100}",
            "1; 2; 3",
        ),
        *(r"x = \frac{-1 \pm \sqrt{13}}{4}, x = 2", "5\\text{ km/h}", r"1 - \frac{1}{\mathrm{e}}", "12.5\\%", "52_8"),
        *(r"(-\infty, 2) \cup (3, \infty)", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", "\\text{east}", "-1 1/2"),
    ),
}
# What reaches out of the process; no grading has reason to.
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "os.remove",
    "os.rename",
)
_WRAPPERS = (
    "{}", "${}$", "$${}$$", "\\boxed{{{}}}", "\\text{{{}}}", "\\operatorname{{{}}}(1)", "x_{{{}}}",
    "5 \\text{{{}}}", "5 {}", "\\left({}\\right)", "x = {}", "The answer is {}.", "{} or 5", "{{{}}}",
    "\\{{x \\mid {}\\}}", "答案是{}", "not {}", "5^{{{}}}", "\\frac{{{}}}{{2}}", "[{}, 1]", "B. {}",
)  # fmt: skip
_BAIT = (
    "A ", "A, ", "A and ", "not A ", "B. ", "(A)", "[1,", "1, 2", "the the ", "the answer is ", "answer: ",
    "I think ", "so ", "no ", "yes, ", "neither A nor ", "any but ", "rule it out ", "A、", "B和", "不是", "因为",
    "是否",
    "1 1/2 ", "1,000", "1 000", "5 km/", "m^2 ", "5 square ", "per ", "\\boxed{", "\\text{", "\\text{a}", "$",
    "$$", "\\(", "\\[", "~~", "**", "__", "_", "`", "x=1,", "x1=1, ", "1:", "12.5 to ", "1 min ", "-", "- ", "−",
    "¬", ".", "..", "...", ";", "=", "<", "\\le ", "\\pm 1", "\\cup (", "<answer>", "</answer>", "<think>",
    "</think>", "\n", "\t", " ", "|", "{", "}", "&", "\\\\", "%", "e", "1e", "^", "/", "*", "!", "'",
)  # fmt: skip
_ODD = (
    "\u202e", "\u200b", "\u0301", "ﷺ", "½", "²", "٣", "१", "𝟗", "Ⅷ", "㎡", "㎞", "℃", "Ａ", "（", "，", "。", "‐", "—",
    "−", "\ud7ff", "\ufeff", "\x00", "\x1b[2J", "\x85", "\u2028", "İ", "ß", "ﬁ", "Å", "µ", "Ω", "∞", "√", "≤", "∅",
    "∈", "∪", "±", "×", "⁄", "’", "🙂",
)  # fmt: skip
_GRAMMAR = (
    "1", "9", "0", "x", "y", "e", "i", "+", "-", "*", "/", "^", "_", "(", ")", "{", "}", "[", "]", ",", ";", "=",
    "<", ">", "!", "|", "%", ".", "&", "$", "\\", "\\frac", "\\sqrt", "\\pi", "\\infty", "\\sin", "\\log_2",
    "\\cdot", "\\text", "\\le", "\\cup", "\\pm", "\\circ", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\left(",
    "\\right)", "\\binom", "or", "and", "not", "is", "km/h", "cm", "percent", "million", "because", "A", "B",
    "yes", "no", "10^", "答案是", "不", "或",
)  # fmt: skip


def code(choose: random.Random, canary: str) -> str:
    """Code that makes the file ``canary`` if anything evaluates it."""
    touch = f"open({canary!r}, 'w').close()"
    text = choose.choice(
        [
            touch,
            f"__import__('os').system('touch {canary}')",
            f"exec({touch!r})",
            f"eval({touch!r})",
            f"(lambda: {touch})()",
            f"[{touch} for x in range(1)]",
            f"sympify({touch!r})",
            f"{{{{{touch}}}}}",
            f"5); {touch}; (5",
            f"Integer({touch})",
            f"Symbol('x', {touch})",
            f"!!python/object/apply:os.system ['touch {canary}']",
            f"$(touch {canary})",
            f"`touch {canary}`",
            f"\\write18{{touch {canary}}}",
            f"\\input{{|touch {canary}}}",
            f"\\immediate\\openout5={canary}",
            f"%c{touch}",
            f"{{0.__class__.__init__.__globals__}} {touch}",
        ]
    )
    if choose.random() < 0.2:  # in full-width letters, which NFKC makes ASCII
        text = "".join(chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign for sign in text)
    return choose.choice(_WRAPPERS).format(text)


def exploding(choose: random.Random, _: str) -> str:
    """Numbers and terms that take for ever or all memory when they are evaluated."""
    number = str(choose.choice([9, 99, 10**3, 10**6, 10**9, 10**18, 10**60, 10**400]))
    depth = choose.randrange(2, 14)
    base = choose.choice(["9", "2.5", "x", "e", "-1", "0.5", number])
    text = choose.choice(
        [
            "**".join([base] * depth),
            "^{".join([base] * depth) + "}" * (depth - 1),
            "(" * depth + base + ")!" * depth,
            base + "!" * depth,
            f"{base}^{number}",
            f"(x+y+z)^{{{number}}}",
            f"\\binom{{{number}}}{{7}}",
            f"1.0000001^{{{number}}}",
            f"{number}e{number}",
            f"10^{{-{number}}}",
            f"3.2 x 10^{number}",
            f"\\log_{{{number}}} {base}",
            f"\\begin{{pmatrix}}1&2\\\\3&{base}\\end{{pmatrix}}^{{{number}}}",
            f"x^{{{number}}} < {base}",
            f"\\sqrt[{number}]{{{base}}}",
            f"\\sin({number})",
            f"\\{choose.choice(['int', 'sum', 'prod', 'lim'])}_{{n=1}}^{{{number}}} n^n",
            "".join(f"(x-{root})" for root in range(depth * 3)),
            "+".join(f"\\sqrt{{{radicand}}}" for radicand in range(2, depth * 3)),
            f"\\pm {base} " * depth,
            "; ".join([f"x^{power} = {base}" for power in range(depth)]),
            f"x^5 - x + {base} < 0 or \\sin(x) > {base}",
            f"{number} {choose.choice(['million', 'dozen', 'km', '万', '%'])}",
            f"0.\\overline{{{number[:9]}}}",
        ]
    )
    return choose.choice(_WRAPPERS).format(text)


def nested(choose: random.Random, _: str) -> str:
    """Brackets without end, closed and not."""
    opening, closing = choose.choice(
        [
            *(
                ("(", ")"),
                ("[", "]"),
                ("{", "}"),
                ("\\frac{1}{", "}"),
                ("\\left(", "\\right)"),
                ("\\sqrt{", "}"),
                ("|", "|"),
            ),
            *(
                ("x_{", "}"),
                ("\\boxed{", "}"),
                ("$", "$"),
                ("\\(", "\\)"),
                ("f(", ")"),
                ("\\text{", "}"),
                ("\\{", "\\}"),
            ),
            *(("\\begin{pmatrix}", "\\end{pmatrix}"), ("<think>", "</think>"), ("<answer>", "</answer>"), ("[[", "]]")),
        ]
    )
    count = choose.choice([3, 6, 40, 400, 3000])
    return choose.choice([opening * count + "1" + closing * count, opening * count, "1" + closing * count])


def repeated(choose: random.Random, _: str) -> str:
    """Bait for regular expressions: a few pieces again and again, and an end that fits none."""
    pieces = "".join(choose.choices((*_BAIT, *_ODD), k=choose.randrange(1, 4)))
    size = choose.choice([10, 300, 2000, 4000, 9000])
    return (pieces * (size // max(1, len(pieces)) + 1))[:size] + choose.choice(["", "!", "A", "5", "\\"])


def huge(choose: random.Random, _: str) -> str:
    """A megabyte of one thing: longer than any answer that is read."""
    piece = choose.choice((*_BAIT, *_ODD, "9", "a", "\\frac{1}{2}", "B and not A. "))
    return piece * (1_000_000 // len(piece))


def odd_characters(choose: random.Random, _: str) -> str:
    """Compatibility forms, marks of direction, digits and letters of many scripts."""
    return "".join(choose.choices((*_ODD, "1", "B", " ", "答", "yes"), k=choose.choice([2, 5, 20, 400])))


def ungrammatical(choose: random.Random, _: str) -> str:
    """Tokens of the grammars themselves in any order, which find what no list does."""
    return choose.choice(["", " "]).join(choose.choices(_GRAMMAR, k=choose.randrange(2, 60)))


def broken_gold(choose: random.Random, _: str) -> str:
    """A gold answer with characters gone, doubled, exchanged or put in."""
    signs = list(choose.choice([gold for golds in GOLD.values() for gold in golds]) * choose.choice([1, 1, 3]))
    for _step in range(choose.randrange(1, 5)):
        position = choose.randrange(len(signs) + 1)
        signs[position : position + choose.randrange(3)] = choose.choice((*_ODD, *_BAIT, *_GRAMMAR))
    return choose.choice(_WRAPPERS).format("".join(signs))


FAMILIES: tuple[tuple[Callable[[random.Random, str], str], int], ...] = (
    *((code, 15), (exploding, 20), (nested, 8), (repeated, 15), (huge, 1), (odd_characters, 8)),
    *((ungrammatical, 18), (broken_gold, 15)),
)


def gradings(count: int, seed: int, canary: Path) -> Iterator[tuple[AnswerKind, str, str]]:
    """``count`` times kind, gold and hostile answer; half of them mathematics, which is what can run away."""
    choose = random.Random(seed)
    makers, weights = zip(*FAMILIES, strict=True)
    others: list[AnswerKind] = [kind for kind in ANSWER_KINDS if kind != "mathematics"]
    for position in range(count):
        kind: AnswerKind = "mathematics" if position % 2 else others[position // 2 % len(others)]
        [make] = choose.choices(makers, weights)
        yield kind, choose.choice(GOLD[kind]), make(choose, str(canary))


def watch() -> None:
    """From here on a grading that reaches out of its process is noted. Called before the first of them."""
    for kind, golds in GOLD.items():
        if kind != "mathematics":
            grade(kind, golds[0], golds[0])  # imports what it needs; no deadline pays for that
    sys.addaudithook(_note)


def grade(kind: AnswerKind, gold: str, answer: str) -> dict[str, Any]:
    """Accuracy of one answer, the processor time it took, and what it did that no grading may do."""
    _noted.clear()
    started = time.process_time()
    if kind == "mathematics":
        value, _ = compare(gold, answer)
    else:
        options = ("A. red", "B. blue") if kind == "multiple_choice" else ()
        sample = Sample("1", "Which?", (), options, gold, kind, source="test", category="test")
        value = CHECKERS[kind](answer, sample, RewardSettings()).value
    return {"value": value, "noted": list(_noted), "cpu_seconds": time.process_time() - started}


_noted: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and any(letter in arguments[1] for letter in "wax+")
    if event in _FORBIDDEN or writes:
        _noted.append(f"{event}{arguments!r}"[:200])


def disobey(canary: str) -> dict[str, Any]:
    """What no grading does: for the test of the guard."""
    _noted.clear()
    open(canary, "w").close()
    return {"noted": list(_noted)}
