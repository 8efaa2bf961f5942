"""Mathematics as text: the statement of an answer, its spelling as LaTeX, and its parts with their units.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlm_pg.answers.clauses import affirmed, explicit_statement, without_lead_in
from vlm_pg.answers.plain_text import boxed, plain, split_at_boxes, whole_font, without_layout
from vlm_pg.answers.units import Unit, parse_unit

SIGNS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∞": r"\infty "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
    | {"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta "}
    | {"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega "}
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {sign: f"^{{{digit}}}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {"₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3", "∨": r"\lor ", "∧": r"\land ", "⁄": "/", "℃": r"^\circ C"}
    | {"∠": r"\angle ", "△": r"\triangle ", "≈": r"\approx ", "∶": ":"}
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

    def digits_only(match: re.Match[str]) -> str:
        return re.sub(r"[^0-9]", "", match[0])

    text = _SPACED_THOUSANDS.sub(digits_only, text)
    if not re.search(r"[(\[]|\\[{l]", text):  # in "(1,234)" the comma may separate two numbers
        text = _COMMA_THOUSANDS.sub(digits_only, text)
    text = _SPACE_MACRO.sub(" ", text)
    text = _MIXED.sub(_mixed, text)
    text = _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", text)
    text = _REPEATING.sub(_as_fraction, _LOG.sub(r"\\log_{\1}(\2)", text))
    return _SCALE.sub(lambda match: f" \\cdot 10^{{{_SCALES[match[1]]}}}", text)


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


MAX_PARTS = 12

_OPENING, _CLOSING = "([{", ")]}"
_SEPARATOR = re.compile(
    r"[,;，；、]|\\q?quad(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z])|"
    r"(?<![A-Za-z\\])(?P<word>or|and)(?![A-Za-z])|\\(?:text|mbox|textrm|mathrm)\s?\{\s{0,3},?\s{0,3}(?P<text>or|and)\s{0,3}\}|或者?|和|与|及"
)
_JOINS = dict.fromkeys(("or", "\\lor", "\\vee", "或", "或者"), "or") | dict.fromkeys(
    ("and", "\\land", "\\wedge"), "and"
)
_SET = re.compile(r"\\left\s?\\\{(.*)\\right\s?\\\}|\\\{(.*)\\\}|\{([^{}\\]*)\}", re.DOTALL)
_NAME = re.compile(r"\s*(\\?[A-Za-z]{1,8})(?:_\{?\s?([A-Za-z0-9]{1,4})\s?\}?)?\s*=(?!=)(?P<value>[^=<>]+)$")
_BASE = re.compile(r"\s*([0-9][0-9A-F]{0,39})_\{?\s?([0-9]{1,2})\s?\}?\s*")
_PERCENT = re.compile(
    r"\s{0,3}(?:\\?%|(?:\\(?:text|mbox)\s?\{)?\s{0,3}per\s?cent(?:age\s{1,3}points?)?\s{0,3}\}?)$", re.IGNORECASE
)
# Of units.py, those that stand before numbers.
CURRENCY_CODES = r"RM|Rs\.?|USD|HKD|AUD|CAD|EUR|GBP|CNY|RMB|JPY|INR"
_CURRENCY_FIRST = re.compile(
    rf"^(-?)\s?((?:US|HK|A|C)?(?:\\\$|\$)|[€£¥₹]|\\(?:euro|pounds)(?![A-Za-z])|(?:{CURRENCY_CODES})(?=\s?[0-9]))\s{{0,3}}(?=[-0-9.\\])"
)
_SIGN_OF = {"\\euro": "€", "\\pounds": "£", "\\cent": "¢", "Rs.": "Rs"}
_CURRENCY_LAST = re.compile(r"\s{0,3}(\\\$|[$€£¥₹¢]|\\(?:euro|cent|pounds))$")
_DEGREES = re.compile(
    r"\s{0,3}\^\s?\{?\s?\\circ\s?\}?\s{0,3}(?:\\(?:text|mathrm)\s?\{\s?([CF])\s?\}|([CF]))?$|\s{0,3}\\degree$"
)
# From the first letters that belong to no macro on; before them stands a number or formula without letters.
_LAST_WORDS = re.compile(
    r"(?P<value>(?:[^A-Za-z\\\u4e00-\u9fff]|\\(?!(?:text|mbox|math)[a-z]{0,6}(?![A-Za-z]))[A-Za-z]{1,12}(?![A-Za-z]))+?)(?P<gap>\s{0,3})"
    r"(?P<words>(?:[A-Za-zμΩ]|[\u4e00-\u9fff]|\\(?:text|mbox|math)[a-z]{0,6}\s?\{).{0,80})"
)
_UNIT_WORDS = re.compile(r"[A-Za-z]{3,20}(?:[ -][A-Za-z]{2,20}){0,4}(?:\s?\^\s?\{?[23]\}?)?\.?|[\u4e00-\u9fff]{1,6}")
# Words that make something else of the number before them, or go on with another statement.
_NO_UNIT = re.compile(
    r"\b(?:or|and|is|are|not|if|when|where|for|than|times|plus|minus|over|hundred|thousand|million|billion|dozen|squared|cubed|factorial|"
    r"half|more|less|but|mod|modulo|at|to|with|by|sin|cos|tan|log|wrong|base|percent)\b|[以多少不或和万亿千百错]",
    re.IGNORECASE,
)
_GLUED_UNITS = 2  # letters that a unit has at least if it stands where variables may


@dataclass(frozen=True)
class Part:
    """One solution. ``latex``: all of it but its unit; ``name`` and ``value``: the two sides of "x_1 = 5"."""

    latex: str
    name: str = ""
    value: str = ""
    unit: Unit | None = None
    is_percent: bool = False
    base: str = ""

    @property
    def variable(self) -> str:
        """The name, without its index."""
        return self.name.partition("_")[0]


@dataclass(frozen=True)
class Parts:
    """The parts of a statement and what joins them: "or", "and", or "" for commas and mixtures."""

    parts: tuple[Part, ...]
    join: str = ""


def read_parts(latex: str, *, letters_are_units: bool) -> Parts:
    """The solutions that a statement lists, "\\pm" spelled out as two.

    Args:
        latex: what ``statement`` returned.
        letters_are_units: whether "5 m" are five metres; where variables may stand it is five times m.
    """
    whole = _SET.fullmatch(latex)
    inside = next((group for group in whole.groups() if group), "") if whole else latex
    if re.search(r"\||\\mid|:|\\[{}]", inside):  # a set by its property, or several sets
        inside = latex
    texts, joins = _split(inside) if inside.strip() else ([latex], set())
    texts = [one for text in texts for one in _both_signs(text)]
    parts = tuple(dict.fromkeys(_read_part(text, letters_are_units) for text in texts))
    return Parts(parts, joins.pop() if len(joins) == 1 else "")


def tuple_elements(latex: str) -> list[str] | None:
    """What stands between the round brackets around all of ``latex``; None if there are none or no comma."""
    inner = re.fullmatch(r"(?:\\left)?\s?\((.*?)(?:\\right)?\s?\)", latex, re.DOTALL)
    if inner is None:
        return None
    texts, _ = _split(inner[1])
    return texts if len(texts) > 1 and all(_is_balanced(text) for text in texts) else None


def has_letters(part: Part) -> bool:
    """Whether a part has variables or words."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", part.latex)) is not None


def _split(text: str) -> tuple[list[str], set[str]]:
    """The texts between separators outside of all brackets, and the kinds of separators."""
    texts, joins, start, index, depth = [], set(), 0, 0, 0
    separators = {match.start(): match for match in _SEPARATOR.finditer(text)}
    while index < len(text):
        match = separators.get(index)
        if match and depth == 0:
            texts.append(text[start:index])
            joins.add(_JOINS.get(match["word"] or match["text"] or match[0], ","))
            start = index = match.end()
            continue
        if text.startswith(("\\begin", "\\end"), index):
            depth += 1 if text.startswith("\\begin", index) else -1
        depth = max(0, depth + (text[index] in _OPENING) - (text[index] in _CLOSING))
        index += 1
    texts.append(text[start:])
    return [stripped for one in texts if (stripped := one.strip())], joins


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth < 0:
            return False
    return depth == 0


def _both_signs(text: str) -> list[str]:
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    signs = (("+", "-"), ("-", "+"))
    return [
        re.sub(r"\\pm(?![A-Za-z])", upper, re.sub(r"\\mp(?![A-Za-z])", lower, text))
        .replace("=+", "=")
        .replace("= +", "= ")
        .lstrip("+ ")
        for upper, lower in signs
    ]


def _read_part(text: str, letters_are_units: bool) -> Part:
    text, unit, is_percent = _without_unit(text.strip(), letters_are_units)
    if based := _BASE.fullmatch(text):
        return Part(based[1], base=based[2])
    named = _NAME.fullmatch(text)
    if not named:
        return Part(text, unit=unit, is_percent=is_percent)
    name = named[1].lower() + (f"_{named[2]}" if named[2] else "")
    return Part(text, name, named["value"].strip(), unit, is_percent)


def _sign(currency: str) -> str:
    return _SIGN_OF.get(currency, currency.replace("\\$", "$"))


def _without_unit(text: str, letters_are_units: bool) -> tuple[str, Unit | None, bool]:
    """``text`` without the unit or percent sign at its end or the currency before it; the unit if it is known."""
    left, equals, right = text.rpartition("=")
    if equals and left.strip():  # the unit is of the right side
        value, unit, is_percent = _without_unit(right.strip(), letters_are_units)
        return f"{left}={value}", unit, is_percent
    if percent := _PERCENT.search(text):
        return text[: percent.start()].strip(), None, True
    if currency := _CURRENCY_FIRST.match(text):
        rest, unit, _ = _without_unit(currency[1] + text[currency.end() :], letters_are_units)
        return rest, unit or parse_unit(_sign(currency[2])), False
    if currency := _CURRENCY_LAST.search(text):
        return text[: currency.start()], parse_unit(_sign(currency[1])), False
    if degrees := _DEGREES.search(text):
        return text[: degrees.start()], parse_unit("°" + (degrees[1] or degrees[2] or "")), False
    if words := _LAST_WORDS.fullmatch(text):
        is_text = TEXT_MACRO.search(text, words.end("value")) is not None
        written = " ".join(TEXT_MACRO.sub(r"\1", words["words"]).replace("\\cdot", "·").split())
        unit = parse_unit(written)
        sure = is_text or letters_are_units or (unit and (len(written) >= _GLUED_UNITS or not written.isascii()))
        named = (
            _UNIT_WORDS.fullmatch(written)
            and not _NO_UNIT.search(written)
            and (is_text or letters_are_units or words["gap"])
        )
        if sure and (unit or named) and re.search(r"[0-9}]", words["value"]):
            return words["value"].strip(), unit, False
    return text, None, False


# Of a whole answer.
MAX_TEXT_CHARACTERS = 2000

_SPACE_BESIDE_NO_DIGIT = re.compile(r"(?<![0-9])\s|\s(?![0-9])")
_DECORATION = ' \t\r\n*_`"“”'
_CLOSING_MARKS = ".,;。，；"
_DELIMITED = re.compile(
    r"(?<!\\)\$\$([^$]+)\$\$|(?<!\\)\$(?=[^\s$])((?:[^$\\]|\\.)*)(?<!\s)\$(?!\d)|"
    r"\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]",
    re.DOTALL,
)
# Not of a formula.
_PRICE = re.compile(rf"(?P<formula>{_DELIMITED.pattern})|(?<!\\)\$(?=\s?-?\.?[0-9])", re.DOTALL)
_DELIMITERS = re.compile(r"(?<!\\)\$|\\[()]|(?<!\\)\\[\[\]]")
# Outside of delimiters these belong to the answer, too: "-$5$", "5 or $7$".
_SUBSTANCE = re.compile(r"[0-9=<>^/+\-(\[{]")
_SYMBOL = re.compile(r"\\?[A-Za-z]{1,8}(?:_\{?[A-Za-z0-9]{1,4}\}?)?(?:\([a-z]\))?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,'’-]+[^\W\d_]+)*")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z}])|[\u4e00-\u9fff]")
# After the last of these a sentence says its number: "The largest n is 34", "There are 7 ways", "共42人".
_COPULA = re.compile(
    r"\b(?:is|are|was|were|be|equals?|equal\s{1,3}to|gets?|got|obtain|obtained|gives?|yields?|have|has|find|needs?|total)\b\s{0,3}:?"
    r"|等于|得到|共有|一共|共|得|为|是|有|:",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\b(?:at\s{1,3}(?:least|most)|than|between|half|twice|up\s{1,3}to|over|under|above|below)\b|"
    r"至少|至多|超过|大于|小于|不到|以上|以下",
    re.IGNORECASE,
)


# "The year 2024": words that leave the number at their end as it is.
_LAST_NUMBER = re.compile(
    rf"[A-Za-z ,'’:]{{0,200}}?(?<![^\s])(?P<number>(?:(?:{CURRENCY_CODES}|\\\$|[€£¥₹])\s?)?-?[0-9][0-9.,]{{0,20}})"
)
_OPERATION = re.compile(
    r"\b(?:of|root|square|squared|cube|cubed|times|plus|minus|negative|over|by|divided|factorial|sum|product|difference|log|sin|cos|tan|"
    r"percent|base|mod|to|or|and|from|sqrt|pi|no|never)\b",
    re.IGNORECASE,
)
# "Area = 12": a word for the quantity in question.
_WORD_EQUALS = re.compile(
    r"^\s{0,3}(?:(?=[a-z]{0,20}[aeiou])[A-Za-z][a-z]{3,20}\s{1,3}){0,3}(?:(?=[A-Za-z]{0,20}[aeiou])[A-Za-z][a-z]{3,20}\s{0,3})?=(?=[^=])\s{0,3}"
)
_REASON = re.compile(r"\b(?:because|since)\b|因为", re.IGNORECASE)
_BEHIND_BOX = re.compile(r"[\s$]{0,4}([^\s$.,;:!?。，、][^$.,;:!?。，、\n]{0,39}?)[\s$]{0,4}(?:[.,;:!?。，、\n]|$)")
_SENTENCE_BREAK = re.compile(r"[.!?][\"')]?\s{1,9}(?=[\"'(]?[A-Z])|[。！？\n]")
_FEWEST_WORDS_OF_A_SENTENCE = 3


def statement(text: str) -> str:
    """The mathematics that an answer states, as LaTeX without delimiters; several statements are joined by commas.

    What is in ``\\boxed{}`` counts, else the one formula of a sentence, else what follows "The answer is" or the
    sentence's verb, else all of it. What a clause rejects does not count. Signs such as "√2", "²" and "≤", and
    "sqrt(2)", "2**3", "3e5", "1 1/2", "10 000" become LaTeX.

        statement("The largest $n$ is $\\frac12$.") -> "\\frac{1}{2}"
    """
    whole = plain(ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", text[: MAX_TEXT_CHARACTERS + 1]).translate(SIGNS)).strip(
        _DECORATION
    )
    whole = _PRICE.sub(lambda found: found["formula"] or "\\$", whole)
    contents, outside = split_at_boxes(whole)
    found = ", ".join(dict.fromkeys(contents)) if contents else _in_sentence(whole)
    if len(contents) == 1:
        found = _with_sign_and_unit(found, *outside)
    if boxed(found):  # a box in a box
        return statement(found)
    if (inner := whole_font(found)) and not _WORDS.fullmatch(inner.strip(" (){}[].")):
        found = inner
    found = _WORD_EQUALS.sub("", found)
    found = " ".join(without_lead_in(_bare(found)).strip(_DECORATION).split())
    return as_latex(_bare(_DELIMITERS.sub("", found)))


def is_explanation(text: str) -> bool:
    """Whether a text is several sentences of which none says that it is the answer, as a box or "The answer is" does.

    is_explanation("They are parallel. They have no common points.") -> True; is_explanation("Mr. Brown") -> False
    """
    if boxed(text) or explicit_statement(text):
        return False
    sentences = _SENTENCE_BREAK.split(without_layout(_DELIMITED.sub("X", plain(text))))
    words_of_each = [count for sentence in sentences if (count := len(_PROSE.findall(sentence)))]
    return len(words_of_each) > 1 and max(words_of_each) >= _FEWEST_WORDS_OF_A_SENTENCE


def unspaced(latex: str) -> str:
    """A statement without the white space that says nothing: that between two digits would.

    unspaced("5 \\sqrt { 2 }") -> "5\\sqrt{2}"
    """
    return _SPACE_BESIDE_NO_DIGIT.sub("", latex)


def words(latex: str, *, gold: bool) -> str | None:
    """A statement that is words rather than mathematics, folded for comparison; None for mathematics.

    Args:
        latex: what ``statement`` returned.
        gold: a gold answer is words only if it says so: ``\\text{}`` around it, a space, or four letters in a row.
            Without it, letters in any number are.
    """
    bare = TEXT_MACRO.sub(r"\1", latex)
    is_marked = bare != latex
    bare = bare.strip(" (){}[].")
    if not _WORDS.fullmatch(bare) or (gold and not (is_marked or len(bare) >= 4 or " " in bare)):
        return None
    return " ".join(bare.casefold().split())


def _bare(text: str) -> str:
    return text.strip(_DECORATION).rstrip(_CLOSING_MARKS).strip(_DECORATION)


def _with_sign_and_unit(content: str, before: str, behind: str) -> str:
    """The content of a box with the minus that touches it, and the unit or percent sign behind it."""
    sign = "-" if re.search(r"(?:^|[^\w)}\]])-\$?$", before) else ""
    unit = _BEHIND_BOX.match(without_layout(behind))
    is_unit = unit is not None and (unit[1] in ("%", "\\%") or parse_unit(unit[1]) is not None)
    return f"{sign}{content} {unit[1]}" if unit and is_unit else sign + content


def _in_sentence(text: str) -> str:
    """What a sentence states: its formulas if all that matters is in them, else what follows its verb."""
    text = without_lead_in(explicit_statement(text) or text).strip(_DECORATION)
    if reason := _REASON.search(text):
        text = text[: reason.start()].rstrip(_CLOSING_MARKS + _DECORATION + "(") or text
    formulas = [next(filter(None, groups), "").strip() for groups in _DELIMITED.findall(text)]
    outside = _DELIMITED.sub(" ", text)
    prose = _DELIMITERS.sub("", text) if not _PROSE.search(outside) else affirmed(text)
    if prose != text and _PROSE.search(outside):
        return _after_verb(_DELIMITERS.sub("", prose))  # something is rejected
    if formulas and not _SUBSTANCE.search(outside) and not _BOUND.search(outside):
        substantial = [formula for formula in formulas if not _SYMBOL.fullmatch(formula)]
        return (
            ", ".join(dict.fromkeys(substantial or formulas)) if _PROSE.search(outside) else _DELIMITERS.sub("", text)
        )
    return _after_verb(_DELIMITERS.sub("", text)) if _PROSE.search(text) else text


def _after_verb(text: str) -> str:
    """What follows the last verb before any number; all of ``text`` if no verb does."""
    first = _SUBSTANCE.search(text)
    verbs = [verb for verb in _COPULA.finditer(text) if first is None or verb.end() <= first.start()]
    if verbs:
        return text[verbs[-1].end() :]
    number = _LAST_NUMBER.fullmatch(_bare(text))
    is_plain = number and not _BOUND.search(text) and not _OPERATION.search(text)
    return number["number"] if number and is_plain else text
