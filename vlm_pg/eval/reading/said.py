"""What is said in plain characters: Markdown, LaTeX's wrappers, full-width and circled letters are passed over."""

from __future__ import annotations

import json
import re
from typing import Any

from vlm_pg.answers.plain_text import plain_formula, without_marks

# Readers of choices, of yes and no and of short texts look at the beginning and the end of a long text only.
MAX_CHARACTERS = 8_000
_ENDS = 2
_FRACTION = re.compile(r"\\[dt]?frac\s{0,3}\{([^{}]{1,100})\}\s{0,3}\{([^{}]{1,100})\}")
_FONT = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|textsf|textnormal|mbox|mathrm|mathbf|mathsf|emph|operatorname)"
    r"\s{0,3}\{((?:[^{}]|\{[^{}]{0,200}\}){0,1000})\}"
)
_DEGREES = re.compile(r"\s{0,2}\^\s{0,2}\{?\s{0,2}\\(?:circ|degree)\s{0,2}\}?")
_FACTOR = re.compile(r"\s*-?(?:[0-9]+(?:\.[0-9]+)?|[^\W\d_]+)\s*")
_INLINE = re.compile(r"(?<![\\$])\$(?=[^\s$])([^$\n]*[^\s$])\$(?![0-9$])")
# A dollar sign that opens no formula and stands before a number is a currency's.
_MATH_MARK = re.compile(r"\\[()\[\]]|\$\$|\\?\$(?!-?\.?[0-9])|\\(?=\$)|\\[,;:! ]|\\quad\b|(?<!~)~(?!~)")
_SIGNS = {r"\rightarrow": "→", r"\to": "→", r"\Rightarrow": "→", r"\times": "×", r"\cdot": "·", r"\checkmark": "✓"}
_SIGN = re.compile(r"\\(?:rightarrow|to|Rightarrow|times|cdot|checkmark)(?![A-Za-z])")
_FENCE = re.compile(r"```\w{0,12}\n?|```")
# Letters in filled circles and squares, which have no compatibility form.
_FILLED = {start + place: chr(ord("A") + place) for start in (0x1F150, 0x1F170) for place in range(26)}
_SIGNATURE = re.compile(r'"(?:final_?)?(?:answer|choice|option)"\s{0,3}:', re.IGNORECASE)
_LIST = re.compile(r"[\[({][^\[\](){}]{0,400}[\])}]")
_MOST_OBJECTS = 20
_ANSWER_KEYS = ("answer", "final_answer", "finalanswer", "final answer", "choice", "option")


def plain_said(text: str) -> str:
    """``text`` without what only sets it: Markdown, LaTeX's fonts and boxes, filled circles; struck out words are gone.

    Of a text of more than ``MAX_CHARACTERS`` its beginning and its end are kept, in which an answer stands.

        plain_said("**Ⓑ** $\\\\frac{A}{2}$") -> "B A/2"
    """
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // _ENDS
        text = text[:half] + "\n\n" + text[-half:]
    text = _FENCE.sub("\n", plain_formula(text.translate(_FILLED)))
    for _ in range(3):
        text = _FONT.sub(r"\1", text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], _DEGREES.sub("°", _FRACTION.sub(_on_one_line, text)))
    text = _MATH_MARK.sub("", _INLINE.sub(r"\1", text).replace("\\%", "%"))
    return without_marks(text.replace("\\n", "\n"), " \t\r\n")


def _on_one_line(fraction: re.Match[str]) -> str:
    return "/".join(part if _FACTOR.fullmatch(part) else f"({part})" for part in fraction.groups())


def with_lists_on_one_line(text: str) -> str:
    """``text`` with lists and objects of one level on a line each, as JSON has them over several."""
    return _LIST.sub(lambda found: " ".join(found[0].split()), text)


def field_of_object(text: str) -> str | None:
    """What the last JSON object of ``text`` has for its answer, as text; None without such an object.

    field_of_object('{"options": ["red"], "answer": "B"}') -> "B"
    """
    if not _SIGNATURE.search(text[-MAX_CHARACTERS:]):
        return None
    text, found, place = text[-MAX_CHARACTERS:], None, 0
    decoder = json.JSONDecoder()
    for _ in range(_MOST_OBJECTS):
        place = text.find("{", place)
        if place < 0:
            break
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        found = _answer_of(value) or found
    return found


def _answer_of(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    for key, content in value.items():
        if key.lower() in _ANSWER_KEYS and isinstance(content, str | int | float | list):
            return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return None
