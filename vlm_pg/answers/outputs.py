"""The text of an output without its thinking, the marks of its chat template and what follows the end of its turn.

All searches take time linear in the output's length: it comes from a model, may be long and may be hostile.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from vlm_pg.answers.plain_text import plain_formula, without_marks

_TAG = r"(?:<|&lt;|＜)\s{0,3}([/\\]?)\s{0,3}%s\s{0,3}(?:>|&gt;|＞)"
_THINK = re.compile(_TAG % "(?:think|thinking|thought)" + r"|◁(/?)think▷", re.IGNORECASE)
_ANSWER = re.compile(_TAG % "(?:answer|final_answer)" + r"|<\|(?:begin|(end))_of_box\|>", re.IGNORECASE)
# What ends a turn, or begins the next one's: all behind it is ignored.
_TURN_END = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>|<(?:eos|end_of_turn)>|<\|im_start\|>\s{0,3}user|"
    r"\n\s{0,3}(?:USER|User|HUMAN|Human)\s{0,3}:"
)
_CHAT_MARK = re.compile(r"<\|\w{1,40}\|>|</?s>|<(?:pad|bos|eos|start_of_turn|end_of_turn)>")
_LEADING = re.compile(rf"(?:[\s\x00]|{_CHAT_MARK.pattern})*")
_ROLE = re.compile(r"\s{0,20}(?:assistant\s{0,3}(?:\n|:)|ASSISTANT\s{0,3}:)\s{0,20}")
# A question of the model's own behind its answer; before any answer it only repeats ours.
_NEXT_QUESTION = re.compile(r"\n\s{0,20}(?:\*\*|#{1,4} )?(?:Question|Q|问题)\s{0,3}[:：]")
_LONGEST_BARE_ANSWER = 200
_SAYS_ANSWER = re.compile(r"\banswer\b|答案", re.IGNORECASE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s{1,3}(\w)")
# Between two final answers nothing but this: they stand side by side, and neither corrects the other.
_JOINING = re.compile(
    r"[\s\x01$\\,;./&|()\[\]*]{0,60}(?:(?:or|and|and/or|oder|und|或者?|和)[\s\x01$\\,;:./&|()\[\]*]{0,60})?",
    re.IGNORECASE,
)
_THOUGHT = "\x00"  # where thinking stood
_TAGGED = "\x01"  # where a character of a tag stood
_GAP = re.compile("[ \x00\x01]+")
_MOST_NESTED = 3
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
_FILLED = {start + index: chr(ord("A") + index) for start in (0x1F150, 0x1F170) for index in range(26)}
_SIGNATURE = re.compile(r'"(?:final_?)?(?:answer|choice|option)"\s{0,3}:', re.IGNORECASE)
_MOST_OBJECTS = 20
_ANSWER_KEYS = ("answer", "final_answer", "finalanswer", "final answer", "choice", "option")


@dataclass(frozen=True)
class ParsedOutput:
    """An output outside its thinking.

    ``text``: all of it, without tags; boxes stay as they are written. ``final``: the content of the last answer tag or
    box (of the box, where a tag holds one), None without any; what the length limit left open is none. ``is_cut``: the
    output was cut off by the length limit and so may be unfinished. ``beside``: the contents of other tags or boxes
    that stand side by side with the last, with no word between but "or" and "and". ``after``: the text behind the
    last tag or box.
    """

    text: str
    final: str | None
    is_cut: bool
    beside: tuple[str, ...] = ()
    after: str = ""


def parse_output(output: str, truncated: bool) -> ParsedOutput | None:
    """``output`` without its thinking and with its final answer; None if nothing is left.

    A thinking block that never closes reaches to the end, unless the output ends in a complete answer element: then
    only its closing tag was left out. One that closes without opening begins with the output (some prompts open it).

        parse_output("<think>Perhaps A.</think> <answer>B</answer>", False) == ParsedOutput("B", "B", False)
    """
    text = _without_chat(_without_comments(_without_thinking(output)))
    marked, spans = _final_spans(text, truncated)
    plain = _plain(marked)
    if not plain and not spans:
        return None
    if not spans:
        return ParsedOutput(plain, None, truncated)
    start, end = spans[-1]
    final, beside = _unboxed(marked[start:end])
    for before, after in zip(reversed(spans[:-1]), reversed(spans[1:])):
        if not _JOINING.fullmatch(_between(marked, before[1], after[0])):
            break
        beside = (_unboxed(marked[before[0] : before[1]])[0], *beside)
    return ParsedOutput(plain, final, truncated, beside, _plain(_between(marked, end, len(marked))))


def _without_thinking(output: str) -> str:
    """``output`` without thinking, and a mark where it stood."""
    pieces: list[str] = []
    begin, is_open = 0, False
    for tag in _THINK.finditer(output):
        closes = bool(tag[1] or tag[2])
        if not closes and not is_open:
            pieces += [output[begin : tag.start()], _THOUGHT]
            begin, is_open = tag.end(), True
        elif closes and is_open:
            begin, is_open = tag.end(), False
        elif closes:
            pieces = [_THOUGHT]
            begin = tag.end()
    rest = output[begin:]
    return "".join(pieces) + (_closing_answer(rest) if is_open else rest)


def _closing_answer(text: str) -> str:
    """The complete answer element that ``text`` ends in, else ""."""
    tags = list(_ANSWER.finditer(text))
    if len(tags) < 2 or text[tags[-1].end() :].strip() or not _closes(tags[-1]) or _closes(tags[-2]):
        return ""
    return text[tags[-2].start() :]


def _closes(tag: re.Match[str]) -> bool:
    return bool(tag[1] or tag[2])


def _without_comments(text: str) -> str:
    """``text`` without HTML's comments."""
    pieces, begin = [], 0
    while (start := text.find("<!--", begin)) >= 0 and (end := text.find("-->", start)) >= 0:
        pieces.append(text[begin:start])
        begin = end + len("-->")
    return "".join(pieces) + text[begin:]


def _without_chat(text: str) -> str:
    """``text`` up to the end of its turn, without the marks of a chat template."""
    begin = _LEADING.match(text)
    if turn := _TURN_END.search(text, begin.end() if begin else 0):
        text = text[: turn.start()]
    text = _CHAT_MARK.sub(lambda mark: mark[0] if mark[0].endswith("_of_box|>") else "", text)
    if role := _ROLE.match(text):
        text = text[role.end() :]
    question = _NEXT_QUESTION.search(text)
    before = text[: question.start()].strip(_THOUGHT + " \n") if question else ""
    is_answered = before and (len(before) <= _LONGEST_BARE_ANSWER or _SAYS_ANSWER.search(before))
    return text[: question.start()] if question and is_answered else text


def _final_spans(text: str, truncated: bool) -> tuple[str, list[tuple[int, int]]]:
    """``text`` with a sign in place of each character of an answer tag; where contents of tags and boxes lie in it."""
    spans: list[tuple[int, int]] = []
    blank, begin, end_of_last = list(text), -1, 0
    for tag in _ANSWER.finditer(text):
        blank[tag.start() : tag.end()] = _TAGGED * (tag.end() - tag.start())
        if not _closes(tag):
            begin = tag.end()
        elif begin >= 0 or not spans:
            # A closing tag alone closes all the text before it.
            spans.append((begin if begin >= 0 else end_of_last, tag.start()))
            begin = -1
        end_of_last = tag.end()
    if begin >= 0 and not truncated:
        spans.append((begin, len(text)))
    marked = "".join(blank)
    outside, inside = [], 0
    for box in _boxes(marked, truncated):
        while inside < len(spans) and spans[inside][1] < box[0]:
            inside += 1
        if inside == len(spans) or not (spans[inside][0] <= box[0] <= spans[inside][1]):
            outside.append(box)
    return marked, sorted(spans + outside)


def _boxes(text: str, truncated: bool) -> list[tuple[int, int]]:
    """Where the contents of the outermost boxes lie; one left open reaches to the end, or is none if that was cut."""
    found = [(match.start(1), match.end(1)) for match in _BARE_BOX.finditer(text)]
    depth, begin, box_depth = 0, -1, 0
    for brace in _BRACES.finditer(text):
        sign = brace[0]
        if sign in ("\\{", "\\}"):
            continue
        if sign == "}":
            if begin >= 0 and depth == box_depth:
                found.append((begin, brace.start()))
                begin = -1
            depth = max(0, depth - 1)
            continue
        depth += 1
        if sign != "{" and begin < 0:
            begin, box_depth = brace.end(), depth
    if begin >= 0 and not truncated:
        found.append((begin, len(text)))
    return sorted(found)


def _unboxed(content: str) -> tuple[str, tuple[str, ...]]:
    """The content of the last box in ``content``, or ``content``; and the boxes beside that one."""
    beside: tuple[str, ...] = ()
    for _ in range(_MOST_NESTED):
        boxes = _boxes(content, truncated=False)
        if not boxes:
            break
        for before, after in zip(reversed(boxes[:-1]), reversed(boxes[1:])):
            if not _JOINING.fullmatch(_between(content, before[1], after[0])):
                break
            beside = (content[before[0] : before[1]].strip(), *beside)
        content = content[boxes[-1][0] : boxes[-1][1]]
    return _plain(content), beside


def _between(text: str, start: int, end: int) -> str:
    """What stands between the contents of two tags or boxes, without the braces and the name of a box."""
    between = text[start:end].removeprefix("}")
    return re.sub(r"\\(?:boxed|fbox)\s{0,3}\{?$", "", between)


def _plain(text: str) -> str:
    return _GAP.sub(lambda gap: gap[0] if gap[0].isspace() else " ", text).strip()


def without_formatting(text: str) -> str:
    """``text`` without what only sets it: Markdown, LaTeX's fonts and boxes, filled circles; struck out words are gone.

    Of a text of more than ``MAX_CHARACTERS`` its beginning and its end are kept, in which an answer stands.

        without_formatting("**Ⓑ** $\\\\frac{A}{2}$") -> "B A/2"
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


def field_of_object(text: str) -> str | None:
    """What the last JSON object of ``text`` has for its answer, as text; None without such an object.

    field_of_object('{"options": ["red"], "answer": "B"}') -> "B"
    """
    if not _SIGNATURE.search(text[-MAX_CHARACTERS:]):
        return None
    text, found, start = text[-MAX_CHARACTERS:], None, 0
    decoder = json.JSONDecoder()
    for _ in range(_MOST_OBJECTS):
        start = text.find("{", start)
        if start < 0:
            break
        try:
            value, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
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
