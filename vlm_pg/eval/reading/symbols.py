"""Numbers and formulas within texts: where each begins and ends, and whether two are equal.

A sign, a unit or a bracket makes another number or formula, so these are never compared by their words and digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from vlm_pg.answers.latex import statement, unspaced
from vlm_pg.answers.numbers import read_quantity
from vlm_pg.answers.options import Choices
from vlm_pg.answers.plain_text import NO_GAPS
from vlm_pg.answers.units import Unit, parse_unit

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_LETTERS = rf"[^\W\d_{NO_GAPS}]"
_TOKEN = re.compile(
    rf"(?P<number>{_DIGITS})|(?P<command>\\(?:[A-Za-z]+|[{{}}|])|[√∛∞∅])|(?P<word>{_LETTERS}+)|"
    r"(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<relation>[=<>≤≥≠≈])|(?P<operator>[-+*/^×÷·⋅±∪∩∈])|"
    r"(?P<affix>[%°$€£¥₹¢_|'∠]|(?<=[0-9]):(?=[0-9]))|(?P<comma>,)"
)
_OPERATOR = re.compile(r"[=<>≤≥≠≈+*/^×÷·]")
_SCALES = frozenset(["hundred", "thousand", "million", "billion", "trillion", "百", "千", "万", "亿"])
_FUNCTIONS = frozenset(["sqrt", "sin", "cos", "tan", "cot", "log", "ln", "exp", "lim", "max", "min", "mod", "pi"])
_LONGEST_NAME = 3
_LONGEST_GAP = 3
_LONGEST_RUN = 300
_JOINING = ("operator", "relation", "comma", "open", "affix")
_UNIT = re.compile(
    r"\s{0,2}((?:°\s?[CF]?|[%¢€£]|[^\W\d_]{1,14}(?:\^?[23])?))(?:\s?[/·*]\s?[^\W\d_]{1,12}(?:\^?-?[1-3])?)?"
)
_MIXED = re.compile(r"\s[0-9]{1,6}\s?/\s?[0-9]")
_QUANTITY = re.compile(
    rf"[-+]?\s?(?:US)?[$€£¥₹]?\s?-?(?:[0-9]+ )?(?:{_DIGITS})(?:\s?/\s?[0-9]+(?:\.[0-9]+)?)?"
    r"(?:\s?(?:×|\*|\\times|\\cdot|·)\s?10\s?\^\s?\{?[+-]?[0-9]{1,4}\}?|[eE][+-]?[0-9]{1,3})?\s{0,2}(?P<unit>\D.{0,30}|)"
)
_NAME = re.compile(r"(?:\\?[^\W\d_]{1,8}|∠[A-Z]{1,3})(?:_\{?\w{1,4}\}?)?(?:\(\w{1,4}\))?")
_SIDES = re.compile(r"(?<![<>!])=|≈|\\approx(?![A-Za-z])")


@dataclass(frozen=True)
class Symbols:
    """A number or formula as it is compared. ``sides``: what its equals signs stand between, in one spelling."""

    sides: tuple[str, ...]
    value: Fraction | None
    unit: Unit | None
    is_percent: bool

    @property
    def is_number(self) -> bool:
        """Whether it comes to a number: "-3 m" or "v = 2 + 3 = 5", and not "x + 1"."""
        return self.value is not None

    def equals(self, other: Symbols) -> bool:
        """Whether both say the same: the same formula, or an equal number; "x = 5" says 5, and not y = 5."""
        if self.sides == other.sides:
            return True
        names = {side.sides[0] for side in (self, other) if len(side.sides) > 1 and _has_letters(side.sides[0])}
        if len(names) > 1 or not all(_NAME.fullmatch(name) for name in names):
            return False
        if self.value is None or other.value is None:
            return self.sides[-1] == other.sides[-1]
        return self._has_unit_of(other)

    def _has_unit_of(self, other: Symbols) -> bool:
        if self.unit is None or other.unit is None:
            is_same_kind = not ((self.is_percent and other.unit) or (other.is_percent and self.unit))
            return is_same_kind and self.value == other.value
        factor = self.unit.factor_to(other.unit)
        return factor is not None and self.value is not None and self.value * factor == other.value


def _has_letters(side: str) -> bool:
    return re.search(r"[^\W\d_]", side) is not None


@lru_cache(maxsize=4096)
def symbols_of(text: str) -> Symbols:
    """What ``text``, one run, says."""
    spelled = re.sub(r"\\([lgn]e)q(?![A-Za-z])", r"\\\1", re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text))
    sides = tuple(_spelled(side) for side in _SIDES.split(spelled) if side.strip())
    last = _SIDES.split(spelled)[-1].strip()
    quantity = _QUANTITY.fullmatch(last)
    is_quantity = quantity is not None and (
        quantity["unit"].strip(" %") in ("", *_SCALES) or parse_unit(quantity["unit"]) is not None
    )
    number, unit = read_quantity(last) if is_quantity else (None, None)
    if number is None or number.exact is None:
        return Symbols(sides or (text,), None, None, False)
    return Symbols(sides, number.exact, unit, number.is_percent)


def _spelled(side: str) -> str:
    return unspaced(statement(re.sub(r"\{(\w)\}", r"\1", side.strip()))) or side.strip()


@dataclass(frozen=True)
class _Token:
    kind: str
    start: int
    end: int


def runs(text: str, *, joins_commas: bool = False) -> list[tuple[int, int]]:
    """Where the numbers and formulas of ``text`` lie, each with its signs, brackets and unit, without words beside it.

    joins_commas: whether a comma outside of brackets belongs to a formula: "2, 3" is then one.

    [text[a:b] for a, b in runs("(B) x = -3 m, not 5")] -> ["x = -3 m", "5"]
    """
    found: list[tuple[int, int]] = []
    run: list[_Token] = []
    depth = 0
    for token in _tokens(text):
        is_comma_alone = token.kind == "comma" and not (depth or joins_commas)
        if token.kind == "word" or is_comma_alone or (run and not _joins(text, run[-1], token, depth)):
            found += _bounds(run, text)
            run, depth = [], 0
        if token.kind == "word" or is_comma_alone:
            continue
        depth += (token.kind == "open") - (token.kind == "close")
        if depth < 0:  # "B) 3": a label
            found += _bounds(run, text)
            run, depth = [], 0
            continue
        run.append(token)
    return found + _bounds(run, text)


def is_symbolic(text: str) -> bool:
    """Whether ``text`` is nothing but numbers and formulas: "-3", "5 %", "x > 3", "y = 2x - 3"."""
    found = runs(text, joins_commas=True) if len(text) <= _LONGEST_RUN else []
    rest = "".join(
        text[end:start] for (_, end), (start, _) in zip([(0, 0), *found], [*found, (len(text), 0)], strict=True)
    )
    return bool(found) and re.search(r"[^\W_]", rest) is None


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        if tokens and match.start() < tokens[-1].end:
            continue
        kind, end = match.lastgroup or "", match.end()
        if kind == "number":
            end = end_of_unit(text, end)
        elif kind == "word" and _is_atom(text, *match.span()):
            kind = "name"
        elif match[0] == "\\{":
            kind = "open"
        elif match[0] == "\\}":
            kind = "close"
        tokens.append(_Token(kind, match.start(), end))
    return tokens


def _is_atom(text: str, start: int, end: int) -> bool:
    """Whether letters are a variable, a function, or part of a name with digits: "x", "sin", the CO of "CO2"."""
    if end - start == 1 or text[start:end].lower() in _FUNCTIONS:
        return True
    if text[start - 1 : start].isdigit() or text[end : end + 1].isdigit():
        return True
    before, after = text[max(0, start - _LONGEST_GAP) : start].rstrip(" "), text[end : end + _LONGEST_GAP].lstrip(" ")
    is_beside_operator = _OPERATOR.fullmatch(before[-1:]) or _OPERATOR.fullmatch(after[:1])
    return end - start <= _LONGEST_NAME and is_beside_operator is not None


def end_of_unit(text: str, place: int) -> int:
    """Where the unit ends that begins behind the number that ends at ``place``; ``place`` without one."""
    found = _UNIT.match(text, place)
    for end in (found.end(), found.end(1)) if found else ():
        written = text[place:end].strip()
        if (
            end > place
            and (written in _SCALES or written == "%" or parse_unit(written))
            and not re.match(rf"{_LETTERS}|[0-9]", text[end : end + 1])
        ):
            return end
    return place


def _joins(text: str, before: _Token, token: _Token, depth: int) -> bool:
    gap = text[before.end : token.start]
    if gap.strip(" ") or len(gap) > _LONGEST_GAP:
        return False
    loose = ("relation", "operator", "comma", "command")
    is_mixed = before.kind == token.kind == "number" and _MIXED.match(text, before.end) is not None
    is_function = text[before.start : before.end].lower() in _FUNCTIONS
    return not gap or before.kind in loose or token.kind in loose or depth > 0 or is_mixed or is_function


def _bounds(run: list[_Token], text: str) -> list[tuple[int, int]]:
    """Where a run lies, without operators and brackets at its ends that join nothing; [] if it says nothing."""
    if not run or run[-1].end - run[0].start > _LONGEST_RUN:
        return []
    depth = sum((token.kind == "open") - (token.kind == "close") for token in run)
    while run and run[-1].kind in _JOINING and text[run[-1].start] not in "%°'$€¢|":
        depth -= run[-1].kind == "open"
        run = run[:-1]
    while run and ((depth > 0 and run[0].kind == "open") or _is_idle_start(run[0], text)):
        depth -= run[0].kind == "open"
        run = run[1:]
    kinds = {token.kind for token in run}
    says_something = kinds & {"number", "command", "relation"} or "operator" in {token.kind for token in run[1:]}
    return [(run[0].start, run[-1].end)] if depth <= 0 and says_something else []


def _is_idle_start(first: _Token, text: str) -> bool:
    """Whether a sign that a run begins with belongs to no formula: a bullet, a dash, "/ 5"."""
    if first.kind == "operator" and text[first.start] in "+-±":
        return text[first.end : first.end + 1].isspace()
    return first.kind in ("operator", "comma", "close") or text[first.start] in "'_%°"


def numbers_in(text: str) -> list[str]:
    """The numbers of ``text`` in order, each with its sign and unit."""
    return [text[start:end] for start, end in runs(text) if re.search("[0-9]", text[start:end])]


def without_formulas(text: str) -> str:
    """``text`` with its numbers alone: without formulas that come to none, as "2x + 3", "(3, 2)" and "2:1"."""
    for start, end in reversed(runs(text)):
        if not symbols_of(text[start:end]).is_number:
            text = f"{text[:start]} {text[end:]}"
    return text


class SymbolicOptions:
    """Those options of a question that are numbers or formulas: named by an equal one, and by nothing else."""

    def __init__(self, choices: Choices) -> None:
        self._symbols = {letter: symbols_of(text) for letter, text in choices if is_symbolic(text)}
        self._joins_commas = any("," in text for letter, text in choices if letter in self._symbols)

    @property
    def letters(self) -> Collection[str]:
        """Of the options that are numbers or formulas."""
        return self._symbols.keys()

    def named(self, text: str) -> str | None:
        """The letter of the one option that ``text``, a number or a formula, equals; None without one."""
        told = symbols_of(text)
        same = [letter for letter, own in self._symbols.items() if own == told]
        same = same or [letter for letter, own in self._symbols.items() if own.equals(told)]
        return same[0] if len(same) == 1 else None

    def replaced(self, text: str, placeholder: Callable[[str], str]) -> str:
        """``text`` with placeholders for the numbers and formulas that equal options."""
        for start, end in reversed(runs(text, joins_commas=self._joins_commas) if self._symbols else []):
            if letter := self.named(text[start:end]):
                text = text[:start] + placeholder(letter) + text[end:]
        return text
