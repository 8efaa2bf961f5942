"""A statement as its parts: each solution of a list, with its name, its unit and whether it is a percentage.

Everything here works on strings in time linear in their length (texts are capped before), and evaluates nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlm_pg.rewards.latex_spelling import TEXT_MACRO
from vlm_pg.rewards.units import Unit, parse_unit

MAX_PARTS = 12

_OPENING, _CLOSING = "([{", ")]}"
_SEPARATOR = re.compile(
    r"[,;，；、]|\\q?quad(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z])|"
    r"(?<![A-Za-z\\])(?P<word>or|and)(?![A-Za-z])|\\(?:text|mbox|textrm|mathrm)\s?\{\s{0,3},?\s{0,3}(?P<text>or|and)\s{0,3}\}|或者?|和|与|及"
)
_JOINS = {
    "or": "or",
    "\\lor": "or",
    "\\vee": "or",
    "或": "or",
    "或者": "or",
    "and": "and",
    "\\land": "and",
    "\\wedge": "and",
}
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
    texts, joins, start, place, depth = [], set(), 0, 0, 0
    separators = {match.start(): match for match in _SEPARATOR.finditer(text)}
    while place < len(text):
        match = separators.get(place)
        if match and depth == 0:
            texts.append(text[start:place])
            joins.add(_JOINS.get(match["word"] or match["text"] or match[0], ","))
            start = place = match.end()
            continue
        if text.startswith(("\\begin", "\\end"), place):
            depth += 1 if text.startswith("\\begin", place) else -1
        depth = max(0, depth + (text[place] in _OPENING) - (text[place] in _CLOSING))
        place += 1
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
