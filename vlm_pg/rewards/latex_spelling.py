"""Mathematics in plain spelling becomes LaTeX as the parser reads it: numbers, powers, roots, names.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re

SIGNS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∞": r"\infty "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
    | {"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta "}
    | {"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega "}
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {sign: f"^{{{digit}}}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {
        "₀": "_0",
        "₁": "_1",
        "₂": "_2",
        "₃": "_3",
        "∨": r"\lor ",
        "∧": r"\land ",
        "⁄": "/",
        "℃": r"^\circ C",
        "∠": r"\angle ",
        "△": r"\triangle ",
        "≈": r"\approx ",
        "∶": ":",
    }
)
TEXT_MACRO = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|textnormal|textsf|texttt|textup|mathrm|mathbf|mathsf|operatorname)\s?\{([^{}]*)\}"
)
_LETTER_MACRO = re.compile(r"\\(?:math(?:rm|bf|sf|it)|text(?:rm|normal|it)?)\s?\{\s?([ei])\s?\}")
ROOT_OF_DIGITS = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s?([0-9]{1,15})(?![0-9.])")
# White space is idle but between words, between numbers and before a number ("Route 66").
_IDLE_SPACE = re.compile(r"\s(?![\w.])|(?<![\w.])\s|(?<=[0-9])\s(?=[^\W\d_])")
_MACRO = re.compile(r"(\\(?!frac)[A-Za-z]{1,12})\s")
_IDLE_BRACES = re.compile(r"\{(\w|\\[A-Za-z]{1,12})\}")
_NUMBER_FRACTION = re.compile(r"\\frac\{(-?[0-9.]{1,15})\}\{([0-9.]{1,15})\}(?![0-9.])")
_GAP = r"(?:(?<!\\)\\[,;:! ]|~|\s)"
_SPACED_THOUSANDS = re.compile(rf"(?<![\w.,^\\])[0-9]{{1,3}}(?:{_GAP}{{1,2}}[0-9]{{3}})+(?![0-9])")
_COMMA_THOUSANDS = re.compile(r"(?<![\w.,^\\])[0-9]{1,3}(?:(?:\{,\}|,(?:\\!\s?)?)[0-9]{3})+(?![0-9])")
_SPACE_MACRO = re.compile(r"(?<!\\)\\[,;:! ]|~")
_MIXED = re.compile(r"(?<![\w.^/{\\])([0-9]{1,9})\s{1,3}([0-9]{1,6})\s?/\s?([0-9]{1,6})(?![\w.])")
_SHORT_FRACTION = re.compile(r"\\([dtc]?frac)\s{0,2}([0-9])\s{0,2}([0-9])(?![0-9])")
_TIMES_TEN = re.compile(
    r"(?<=[0-9])\s{0,2}(?:[xX*]|\\times|\\cdot)\s{0,2}10\s{0,2}\^\s{0,2}\{?\s{0,2}([+-]?[0-9]{1,4})\s{0,2}\}?"
)
_SIGNED_POWER = re.compile(r"\^\s{0,2}(-[0-9]{1,6})(?![0-9])")
_SCIENTIFIC = re.compile(r"(?<![\w\\])([0-9]{1,15}(?:\.[0-9]{1,15})?)[eE]([+-]?[0-9]{1,3})(?![\w.])")
_SCALE = re.compile(r"(?<=[0-9])\s{0,2}(hundred|thousand|million|billion|trillion|万|亿|百万)(?![A-Za-z])")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8, "百万": 6}
_MINUS_WORD = re.compile(r"(?<![A-Za-z\\])(?:minus|negative)\s{1,3}(?=[0-9.\\(])|负\s{0,2}(?=[0-9.])", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|infinity|infty|inf)(?![A-Za-z])")
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s?\(([^()]*)\)")
_LOG = re.compile(r"\\log_\s?\{?([0-9]{1,4})\}?\s{1,3}([0-9]{1,6})")
_APPROXIMATELY = re.compile(
    r"^\s{0,3}(?:\\approx(?![A-Za-z])|(?:about|approximately|approx\.?|roughly|around|约|大约)\s{0,3})", re.IGNORECASE
)
_REPEATING = re.compile(r"(?<![\w.])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar)\s?\{\s?([0-9]{1,9})\s?\}")
_BRACKETED_UNIT = re.compile(r"(?<=[0-9])\s{0,2}\(([a-z]{3,20})\)$")
_UNION = re.compile(r"(?<=[)\]])\s{0,3}U\s{0,3}(?=[(\[])")
_NESTED_LISTS = re.compile(r"\s*\[\s?(\[[^\[\]]*\](?:\s?,\s?\[[^\[\]]*\]){0,20})\s?\]\s*")
_SET_BUILDER = re.compile(r"\\\{\s?[a-z]\s?(?:\\in\s?\\mathbb\s?\{?R\}?)?\s?(?:\\mid|\||:)\s?(?P<rule>[^|{}]*)\\\}")
# Angles and triangles are named by their corners: ABC is CBA, and no ACB; the triangle's may come in any order.
_CORNERS = re.compile(r"\\(angle|triangle)\s{0,3}([A-Z]{3})(?![A-Za-z])")
_EMPTY_SET = re.compile(
    r"\\varnothing(?![A-Za-z])|(?:the\s{1,3})?empty\s{1,3}set|空集|^\s{0,3}\\?\{\s{0,3}\\?\}\s{0,3}$", re.IGNORECASE
)


def one_spelling(formula: str) -> str:
    """A formula in one spelling, to compare it with another as text; nothing is evaluated.

    one_spelling("3 \\\\sqrt { 2 }") == one_spelling("3√2"); one_spelling("\\\\dfrac{3}{4}") == one_spelling("3/4")
    """
    text = ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", formula).translate(SIGNS).replace("\\%", "%").replace("$", "")
    text = _IDLE_SPACE.sub("", _MACRO.sub(r"\1", re.sub(r"\\[dtc]frac", r"\\frac", text)))
    text = _NUMBER_FRACTION.sub(r" \1/\2", _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", text))
    return _IDLE_SPACE.sub("", _IDLE_BRACES.sub(r"\1", text))


def as_latex(text: str) -> str:
    """``text`` with numbers, powers, roots and names of functions as LaTeX writes them.

    as_latex("1 1/2") -> "1\\frac{1}{2}"; as_latex("10\\,000") -> "10000"; as_latex("3.2 x 10^5") -> "3.2 \\cdot 10^{5}"
    """
    if builder := _SET_BUILDER.fullmatch(text):
        text = builder["rule"]
    if rows := _NESTED_LISTS.fullmatch(text):
        text = "\\begin{pmatrix}" + re.sub(r"\]\s?,\s?\[", r"\\\\", rows[1])[1:-1].replace(",", "&") + "\\end{pmatrix}"
    text = _BRACKETED_UNIT.sub(r" \1", text)
    text = _EMPTY_SET.sub(r"\\emptyset ", _APPROXIMATELY.sub("", text))
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    text = _CORNERS.sub(_corners, _UNION.sub(r" \\cup ", text))
    text = _numbers(_LETTER_MACRO.sub(r"\1", text))
    text = _MINUS_WORD.sub("-", text.replace("**", "^"))
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_NAME.sub(lambda match: "\\infty " if match[1].startswith("inf") else f"\\{match[1]} ", text)
    text = _TIMES_TEN.sub(r" \\cdot 10^{\1}", text)
    text = _SIGNED_POWER.sub(r"^{\1}", text)
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)


def _numbers(text: str) -> str:
    """Thousands without separators, mixed numbers and short fractions with braces, "million" as a power of ten."""
    text = _SPACED_THOUSANDS.sub(_digits_only, text)
    if not re.search(r"[(\[]|\\[{l]", text):  # in "(1,234)" the comma may separate two numbers
        text = _COMMA_THOUSANDS.sub(_digits_only, text)
    text = _SPACE_MACRO.sub(" ", text)
    text = _MIXED.sub(_mixed, text)
    text = _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", text)
    text = _REPEATING.sub(_as_fraction, _LOG.sub(r"\\log_{\1}(\2)", text))
    return _SCALE.sub(lambda match: f" \\cdot 10^{{{_SCALES[match[1]]}}}", text)


def _digits_only(match: re.Match[str]) -> str:
    return re.sub(r"[^0-9]", "", match[0])


def _corners(match: re.Match[str]) -> str:
    kind, corners = match.groups()
    first = min(corners, corners[::-1]) if kind == "angle" else "".join(sorted(corners))
    return f"\\text{{{kind} {first}}}"


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    above = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return f"\\frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _mixed(match: re.Match[str]) -> str:
    """A whole number and a proper fraction; others stay, and are refused as two numbers side by side."""
    is_proper = int(match[2]) < int(match[3])
    return f"{match[1]}\\frac{{{match[2]}}}{{{match[3]}}}" if is_proper else match[0]
