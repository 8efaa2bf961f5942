"""SubRip and WebVTT files, line by line: every line is a number, times, a text or a comment, or the file is refused.

Readers made for players go on behind what they cannot read. Here that would be words that a question may be about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

_LINE_END = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(r"\s*(\d{1,9})\s*", re.ASCII)
# A fraction of three digits, or of zeros: FFmpeg takes ",50" for 0.050 s, pysubs2 for 0.500 s, and there are tools that
# count frames in it.
# What may follow the times is where the text stands (X1:40 in SubRip, align:start in WebVTT).
_TIMES = r"\s*{0}\s*-->\s*{0}(?:\s+[A-Za-z]\w*:[-+\w%.,#]+)*\s*"
_SRT_TIMES = re.compile(_TIMES.format(r"(\d{1,9}):(\d{1,2}):(\d{1,2})[,.](\d{3}|00?)"), re.ASCII)
_VTT_TIMES = re.compile(_TIMES.format(r"(?:(\d{1,9}):)?([0-5]?\d):([0-5]?\d)\.(\d{3}|00?)"), re.ASCII)
_ARROW = re.compile(r"-->|->|[–—−]>|→")
_DIGIT = re.compile(r"\d", re.ASCII)
_CLOCK = re.compile(r"\s*\d+\s*:\s*\d", re.ASCII)
_LONG_CLOCK = re.compile(r"\d:\d+:\d", re.ASCII)
_TWO_CLOCKS = re.compile(r"\s*\d+:\d+:\d+[.,]\d+\W+\d+:\d+:\d", re.ASCII)
_VTT_HEAD = re.compile(r"WEBVTT(?:[ \t].*)?")
_VTT_BESIDE = re.compile(r"(?:NOTE|STYLE|REGION)(?:[ \t].*)?")
_VTT_MAP = re.compile(r"X-TIMESTAMP-MAP\s*=")
_VTT_MAP_PARTS = re.compile(
    r"X-TIMESTAMP-MAP\s*=(?=.*MPEGTS:(\d{1,18}))(?=.*LOCAL:(?:(\d{1,9}):)?(\d\d):(\d\d)\.(\d{3})).*", re.ASCII
)


class Fault(Exception):
    """What is wrong with the file, in words that follow its name."""


@dataclass
class Written:
    """A subtitle as it is written: from when until when, in milliseconds, and the lines of its text with markup."""

    start: int
    end: int
    lines: list[str] = field(default_factory=list)


def lines_of(text: str) -> list[str]:
    """Lines as WebVTT ends them: a form feed or U+2028 stays within its line."""
    return _LINE_END.split(text)


def read_srt(lines: Sequence[str]) -> list[Written]:
    """The subtitles of a SubRip file: each a number, times, and the text up to the next number.

    Text may hold empty lines, as for FFmpeg.

    Raises:
        Fault: a line is neither.
    """
    found: list[Written] = []
    number = None
    above: list[int] = []  # places of the lines with words since the last times
    for place, line in enumerate(lines):
        if times := _SRT_TIMES.fullmatch(line):
            number = _number_above(lines, above, place, number)
            _end_srt(lines, found, above[:-1])
            found.append(Written(*_milliseconds(times)))
            above = []
        elif _meant_as_times(line, _is_number(lines, place - 1, number)):
            _refuse(lines, place, "where times like 00:01:02,345 --> 00:01:04,000 are expected")
        elif line.strip():
            above.append(place)
    if not found:
        raise Fault("hold no times")
    _end_srt(lines, found, above)
    return found


def _meant_as_times(line: str, expected: bool) -> bool:
    """Whether somebody typed times, or a text recogniser saw some: "0:05 -> 0:06", "00:00:0l,000 --> 00:00:02,000".

    A text may name times as well, "10:30 we leave". Two of them are a subtitle's; so is one where times are expected.
    """
    before, *after = _ARROW.split(line, maxsplit=1)
    if not after:
        return bool((_CLOCK if expected else _TWO_CLOCKS).match(line))
    if expected:
        return bool(_DIGIT.search(line))
    if "-->" not in line:
        return bool(_CLOCK.match(before) and _CLOCK.match(after[0]))
    beside = before.rsplit(maxsplit=1)[-1:] + after[0].split(maxsplit=1)[:1]
    return bool(_LONG_CLOCK.search(line)) or (len(beside) == 2 and all(map(_DIGIT.search, beside)))


def _is_number(lines: Sequence[str], place: int, last: int | None) -> bool:
    """Whether a line is a subtitle's number, as far as it can be told from a text such as "1984"."""
    match = _NUMBER.fullmatch(lines[place]) if place >= 0 else None
    return match is not None and (int(match[1]) - 1 == last or _begins(lines, place))


def _begins(lines: Sequence[str], place: int) -> bool:
    return place == 0 or not lines[place - 1].strip()


def _number_above(lines: Sequence[str], above: Sequence[int], place: int, last: int | None) -> int:
    """The number that the times in line ``place`` stand below. It must be told from a text such as "1984"."""
    match = _NUMBER.fullmatch(lines[above[-1]]) if above else None
    if match is None:
        _refuse(lines, place, "without a number above")
    number, at = int(match[1]), above[-1]
    stands_alone = at + 1 == place and _begins(lines, at)
    if last is not None and number != last + 1 and not stands_alone:
        _refuse(lines, at, f"which may be a text or a number: {last + 1}, or an empty line before it, is expected")
    return number


def _end_srt(lines: Sequence[str], found: Sequence[Written], above: Sequence[int]) -> None:
    if above and not found:
        _refuse(lines, above[0], "before the first times")
    for place in above:
        found[-1].lines.append(lines[place])


def read_vtt(lines: Sequence[str]) -> list[Written]:
    """The subtitles of a WebVTT file, by the blocks of the standard (W3C WebVTT, 6.1): an empty line ends one.

    Notes, styles and regions are left out. A file that is a header alone has no subtitles.

    Raises:
        Fault: a line belongs to none of these; times are moved by X-TIMESTAMP-MAP.
    """
    if not _VTT_HEAD.fullmatch(lines[0]):
        raise Fault("do not begin with WEBVTT")
    written = (_cue_of(lines, block) for block in _blocks(lines, _skip_head(lines)))
    return [one for one in written if one is not None]


def _blocks(lines: Sequence[str], start: int) -> Iterator[list[int]]:
    """The places of each block's lines. Times stand in its first or second line; others begin the next block."""
    block: list[int] = []
    has_times = False
    for place in range(start, len(lines)):
        line = lines[place]
        if block and (not line or ("-->" in line and (has_times or len(block) > 1))):
            yield block
            block, has_times = [], False
        if line:
            block.append(place)
            has_times |= "-->" in line
    if block:
        yield block


def _cue_of(lines: Sequence[str], block: Sequence[int]) -> Written | None:
    """The subtitle of a block; None of a note, a style or a region."""
    for count, place in enumerate(block[:2], 1):
        if times := _VTT_TIMES.fullmatch(lines[place]):
            _refuse_times(lines, block[count:], expected=False)
            return Written(*_milliseconds(times), [lines[place] for place in block[count:]])
    if _VTT_BESIDE.fullmatch(lines[block[0]]):
        return None
    _refuse_times(lines, block, expected=True)
    _refuse(lines, block[0], "without times: an empty line ends a text")


def _refuse_times(lines: Sequence[str], block: Sequence[int], expected: bool) -> None:
    for place in block:
        if "-->" in lines[place] or _meant_as_times(lines[place], expected):
            _refuse(lines, place, "where times like 01:02.345 --> 01:04.000 are expected")


def _skip_head(lines: Sequence[str]) -> int:
    """The place of the first line behind the header."""
    for place, line in enumerate(lines[1:], 1):
        if not line or "-->" in line:
            return place
        if _VTT_MAP.match(line) and not _moves_nothing(line):
            why = "which moves all times to the clock of a stream; delete it if they count from the video's beginning"
            _refuse(lines, place, why)
    return len(lines)


def _moves_nothing(line: str) -> bool:
    """Whether an X-TIMESTAMP-MAP (RFC 8216, 3.5) maps a time to itself: ticks of 1/90000 s to a local time."""
    parts = _VTT_MAP_PARTS.fullmatch(line)
    if parts is None:
        return False
    ticks, *local = (int(part or 0) for part in parts.groups())
    return ticks == 90 * _total(*local)


def _milliseconds(times: re.Match[str]) -> tuple[int, int]:
    parts = [int(part or 0) for part in times.groups()]
    return _total(*parts[:4]), _total(*parts[4:])


def _total(hours: int, minutes: int, seconds: int, milliseconds: int) -> int:
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + milliseconds


def _refuse(lines: Sequence[str], place: int, why: str) -> NoReturn:
    raise Fault(f"have '{lines[place].strip()[:60]}' in line {place + 1}, {why}")
