"""The moments and spans of time that a sentence names, in seconds since the video's start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlm_pg.answers.plain_text import WORD_LETTER

MAX_TIMES = 100
# What is counted beside a number is no time: "5-10 people".
_THINGS = (
    r"(?:people|persons?|men|women|children|kids|boys|girls|players|students|adults|guests|cups|chairs|tables|books|cars|items|"
    r"objects|things|steps|pages|points|dollars|euros|degrees|metres?|meters?|feet|inches|cm|km|kg|years?|days?|weeks?|months?|"
    r"hours?|scenes?|shots|clips|videos|images|pictures)\b"
)

_VALUE = r"[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}"
_END = rf"(?!{WORD_LETTER}|[0-9_])"
_SECONDS = (
    rf"(?:(?:milliseconds?|msecs?|ms|seconds?|secs?|secondes?|segundos?|secondi|secondo|"
    rf"sekunden?|seconden|секунд[аыу]?|сек|с|s){_END}|"
    r"毫秒|秒钟?|초|ثانية|ثواني|सेकंड|सेकेंड)"
)
_MINUTES = rf"(?:(?:minutes?|minutos?|minuti|minuto|minuten|mins?|минут[аыу]?|мин|m){_END}|分钟?|分鐘|분|دقيقة|मिनट)"
_HOURS = rf"(?:(?:hours?|hrs?|heures?|horas?|stunden?|h){_END}|小时|時間|시간)"
_TIME = re.compile(
    rf"(?<!{WORD_LETTER})(?<![0-9_.:])"
    r"(?:(?:(?P<clock_hours>[0-9]{1,2}):)?(?P<clock_minutes>[0-9]{1,3}):(?P<clock_seconds>[0-5]?[0-9](?:\.[0-9]{1,9})?)(?![0-9:])"
    rf"|(?:(?P<hours>{_VALUE})\s?{_HOURS}\s?(?:and\s)?)?(?P<minutes>{_VALUE})\s?{_MINUTES}"
    rf"(?:\s?,?\s?(?:and\s|und\s|et\s|y\s|e\s|и\s)?(?P<and_seconds>{_VALUE})\s?{_SECONDS})?"
    rf"|(?P<seconds>{_VALUE})(?:\s?(?P<unit>{_SECONDS})|(?!{WORD_LETTER}|[0-9_:]|\.[0-9]|"
    rf"\s?(?:%|percent|fps|frames?\b|times?\b|{_THINGS}))))",
    re.IGNORECASE,
)
_THE_SECOND = (
    r"(?:(?:about|around|approximately|roughly|ca\.?|etwa|environ|约)\s{0,3})?"
    r"(?:(?:the\s|der\s|la\s|el\s|o\s)?(?:second|seconds|sekunde|seconde|segundo|secondo|"
    r"секунд[аыу]|الثانية|t\s?=|at|第)\s{0,3})?"
)
_JOIN = re.compile(
    r"[\s>\"'”)\]]{0,4}(?:-{1,2}>?|~|→|=>|(?:to|until|till|through|thru|bis|à|jusqu['’]à|a|al|"
    r"até|hasta|fino\s(?:a|al)|tot|до|по|से)\b|到|至|から|에서|부터|إلى|～|〜)"
    rf"(?:\s?(?:at|zur|zum|la|le|los|the)\b)?[\s<\"'(\[]{{0,4}}{_THE_SECOND}[<\"'(\[]{{0,2}}",
    re.IGNORECASE,
)
_COMMA = re.compile(r"\s?[,;]\s{0,3}")
_AND = re.compile(rf"\s{{0,3}}(?:(?:and|und|et|y|e|и)\s{{1,3}}|和|与){_THE_SECOND}", re.IGNORECASE)
_BETWEEN = re.compile(
    r"(?:\b(?:between|zwischen|entre|tra|fra|tussen|между)|"
    r"\bstart\s{1,3}and\s{1,3}end(?:ing)?\s{1,3}(?:times?|points?|timestamps?)?\s{0,3}(?:are|is|:))"
    rf"\s{{0,3}}{_THE_SECOND}$",
    re.IGNORECASE,
)
# "It starts between 4 and 5 s" tells of the start alone.
_RANGE_OF_ONE = re.compile(
    r"\b(?:starts?|begins?|ends?|stops?|finishes)\s(?:\w{1,12}\s)?between\s{0,3}$", re.IGNORECASE
)
_BEGINNING = re.compile(
    r"\b(?:(?:very\s{1,3})?(?:beginning|start)(?:\s{1,3}of\s{1,3}the\s{1,3}(?:video|clip))?|"
    r"anfang(?:\s{1,3}des\s{1,3}videos)?|début(?:\s{1,3}de\s{1,3}la\s{1,3}vidéo)?|"
    r"principio(?:\s{1,3}del\s{1,3}v[ií]deo)?)"
    r"\s{0,3},?\s{0,3}(?:up\s{1,3})?(?:to|until|till|through|bis|jusqu['’]à|"
    r"hasta)\s{1,3}(?:about\s{1,3}|around\s{1,3}|the\s{1,3})?$|(?:开头|开始|开端)(?:到|至)\s{0,3}(?:第)?$|最初から$",
    re.IGNORECASE,
)
_FIRST = re.compile(
    r"(?:\b(?:during|in|within|for|throughout|over)?\s{0,3}the\s{1,3}first|"
    r"\bin\s{1,3}den\s{1,3}ersten|\bles|\blos\s{1,3}primeros|前|最初の)\s{0,3}(?:premières\s)?$",
    re.IGNORECASE,
)
_START = re.compile(
    r"(?:\b(?:start(?:s|ed|ing)?|begin(?:s|ning)?|began|onset|commences?|beginnt|anfang|"
    r"startet|débute|début|commence|empieza|comienza|inicio|inizia|começa|início|"
    r"начинается|начало)\b|\bstart_(?:time|sec\w{0,4})\b|开始|起始|开始时间|시작|開始)[^0-9.;\n]{0,60}$",
    re.IGNORECASE,
)
_STOP = re.compile(
    r"(?:\b(?:end(?:s|ed|ing)?|finish(?:es|ed)?|stops?|concludes?|offset|endet|ende|termine|"
    r"fin|finit|acaba|termina|fim|fine|finisce|заканчивается|конец|until)\b|"
    r"\bend_(?:time|sec\w{0,4})\b|结束|终止|종료|끝|終了)[^0-9.;\n]{0,60}$",
    re.IGNORECASE,
)
_LASTS = re.compile(
    r"\b(?:lasts?|lasting|continues?|goes\s{1,3}on|dauert|dure|dura|длится|duration|"
    r"takes)\b[^0-9.;\n]{0,30}$|(?:持续|時間は)[^0-9.;\n]{0,10}$",
    re.IGNORECASE,
)
_AT, _BY = (
    re.compile(r"\bat\s{1,3}[<\[(]?\s?$", re.IGNORECASE),
    re.compile(r"\b(?:by|until|till)\s{1,3}[<\[(]?\s?$", re.IGNORECASE),
)
# A span of the video itself, not of what happens in it.
_OF_VIDEO = re.compile(
    r"\b(?:clip|video|footage|recording),?\s{0,3}(?:(?:which|that|itself)\s)?(?:runs?|lasts?|"
    r"spans?|goes|covers|ranges)\b[^.;\n]{0,20}$",
    re.IGNORECASE,
)
_FRAMES = re.compile(
    r"\bframes?\s{1,3}(?:#\s?)?([0-9]{1,9})\s{0,3}(?:-|to|until|through|and|bis)\s{0,3}(?:frame\s{1,3})?([0-9]{1,9})",
    re.IGNORECASE,
)
_RATE = re.compile(
    r"([0-9]{1,4}(?:\.[0-9]{1,4})?)\s{0,3}(?:fps\b|frames\s{1,3}(?:per|a|each)\s{1,3}second|frames/s)", re.IGNORECASE
)
_WINDOW = 80


@dataclass(frozen=True)
class Time:
    """A moment or a length, and where it stands. ``is_bare``: a number without a unit; ``in_minutes``: its unit is."""

    seconds: float
    start: int
    end: int
    is_bare: bool = False
    in_minutes: bool = False


Span = tuple[float, float]


def times_in(text: str) -> list[Time]:
    """The first numbers of ``text`` that may be times; those without a unit are seconds.

    times_in("1 min 5 s, 0:07") finds 65 and 7 seconds.
    """
    found: list[Time] = []
    frames = [match.span() for match in _FRAMES.finditer(text)]
    for match in _TIME.finditer(text):
        if len(found) >= MAX_TIMES:
            break
        if any(start <= match.start() < end for start, end in frames):
            continue
        found.append(Time(_seconds(match), *match.span(), _is_bare(match), match["minutes"] is not None))
    return found


def spans_in(text: str) -> list[Span]:
    """The different spans that ``text`` names, in order, none of the video itself; reversed ones included.

    spans_in("from 0:12 to 1:05") -> [(12.0, 65.0)]
    """
    times = times_in(text)
    spans = [*_joined(text, times), *_from_beginning(text, times)]
    if not spans:
        spans = _labelled(text, times) or _at_and_by(text, times)
    return list(dict.fromkeys(spans))


def frames_as_span(text: str) -> Span | None:
    """The span of the one range of frames that ``text`` names with their rate; None without either."""
    ranges = {(float(match[1]), float(match[2])) for match in _FRAMES.finditer(text)}
    rates = {float(match[1]) for match in _RATE.finditer(text)}
    if len(ranges) != 1 or len(rates) != 1 or (rate := rates.pop()) <= 0:
        return None
    first, last = ranges.pop()
    return first / rate, last / rate


def _seconds(match: re.Match[str]) -> float:
    if match["clock_seconds"]:
        hours, minutes = float(match["clock_hours"] or 0), float(match["clock_minutes"])
        return 3600 * hours + 60 * minutes + float(match["clock_seconds"])
    if match["minutes"]:
        return 3600 * float(match["hours"] or 0) + 60 * float(match["minutes"]) + float(match["and_seconds"] or 0)
    unit = (match["unit"] or "").lower()
    return float(match["seconds"]) / (1000 if unit.startswith(("ms", "milli", "毫")) else 1)


def _is_bare(match: re.Match[str]) -> bool:
    return match["seconds"] is not None and not match["unit"]


def _joined(text: str, times: list[Time]) -> list[Span]:
    """Pairs of neighbours that a dash, "to", or in brackets a comma joins."""
    spans, place = [], 0
    while place + 1 < len(times):
        first, second = times[place], times[place + 1]
        gap, before = text[first.end : second.start], text[max(0, first.start - _WINDOW) : first.start]
        if _is_pair(text, gap, before, first, second):
            # "1 to 2 minutes": the first has the second's unit.
            start = 60 * first.seconds if first.is_bare and second.in_minutes else first.seconds
            if not _OF_VIDEO.search(before):
                spans.append((start, second.seconds))
            place += 1
        place += 1
    return spans


def _is_pair(text: str, gap: str, before: str, first: Time, second: Time) -> bool:
    if _JOIN.fullmatch(gap):
        return True
    behind = text[second.end : second.end + 4].lstrip()
    in_brackets = re.search(r"[\[(<]\s?$", before) is not None and behind.startswith(("]", ")", ">"))
    if _COMMA.fullmatch(gap):
        alone = not text[: first.start].strip(" [(<") and not text[second.end :].strip(" ])>.")
        return in_brackets or alone
    if _AND.fullmatch(gap):
        if _RANGE_OF_ONE.search(before):
            return False
        return _BETWEEN.search(before) is not None or not (text[: first.start] + text[second.end :]).strip(" .[]()<>")
    return False


def _from_beginning(text: str, times: list[Time]) -> list[Span]:
    """Spans that begin at 0: "from the beginning until 5 s", "the first five seconds"."""
    spans = []
    for time in times:
        before = text[max(0, time.start - _WINDOW) : time.start]
        if _BEGINNING.search(before) or (_FIRST.search(before) and not time.is_bare):
            spans.append((0.0, time.seconds))
    return spans


def _labelled(text: str, times: list[Time]) -> list[Span]:
    """A start and an end, or a start and a length, each named as that, in any order."""
    starts, ends, lengths = [], [], []
    begin = 0
    for time in times:
        before = text[max(begin, time.start - _WINDOW) : time.start]
        if _RANGE_OF_ONE.search(before):
            return []
        if _LASTS.search(before):
            lengths.append(time.seconds)
        elif (stop := _STOP.search(before)) and not ((start := _START.search(before)) and start.start() > stop.start()):
            ends.append(time.seconds)
        elif _START.search(before):
            starts.append(time.seconds)
        begin = time.end
    if len(set(starts)) == 1 and len(set(ends)) == 1:
        return [(starts[0], ends[0])]
    if len(set(starts)) == 1 and len(set(lengths)) == 1 and not ends:
        return [(starts[0], starts[0] + lengths[0])]
    # Several of either are several spans, or none that is clear.
    return [(a, b) for a in starts for b in ends]


def _at_and_by(text: str, times: list[Time]) -> list[Span]:
    """ "Puts it down at 20 s and has closed it by 31 s": the start and the end of what two moments bound."""
    if len(times) != 2:
        return []
    first, second = times
    bounds = _AT.search(text[max(0, first.start - _WINDOW) : first.start]) and _BY.search(
        text[first.end : second.start]
    )
    return [(first.seconds, second.seconds)] if bounds else []
