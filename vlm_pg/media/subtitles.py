"""Subtitles of a video, SubRip or WebVTT: their texts in plain words, and which are shown during a part of it.

Every line is a number, times, a text or a comment, or the file is refused. Readers made for players (such as pysubs2)
skip lines that they cannot read: here these would be words that a question may be about.
"""

from __future__ import annotations

import codecs
import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn

from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import open_regular
from vlm_pg.media.paths import url_path
from vlm_pg.media.remote import download
from vlm_pg.media.sampling import Part, Timeline
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import Cue

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_subtitles(path: str, name: str, settings: MediaSettings) -> tuple[Cue, ...]:
    """All subtitles of a local file or a URL, in the order of their beginnings.

    Markup is taken away and each text put on one line; what has no text then is left out. Their times are those of the
    file: seconds on a player's clock (``cues_within``).

    Raises:
        SampleError: ``bad_subtitles`` for a file that is too large, in another encoding than UTF-8 or UTF-16, or has a
            line that is not written as its name says; what ``download`` raises.
    """
    try:
        if "://" in path:
            with download(path, settings) as file:
                file.seek(0)
                data = file.read(settings.max_subtitle_bytes + 1)
            suffix = PurePosixPath(url_path(path)).suffix
        else:
            with open_regular(Path(path)) as file:
                data = file.read(settings.max_subtitle_bytes + 1)
            suffix = Path(path).suffix
        if len(data) > settings.max_subtitle_bytes:
            raise Fault(f"are larger than media.max_subtitle_bytes={settings.max_subtitle_bytes}")
        encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            why = f"are not text in {encoding.upper().removesuffix('-SIG')} (byte {error.start})"
            raise Fault(why) from error
        return _cues(text, suffix.lower().removeprefix("."))
    except (Fault, DecodeFailure, OSError) as error:
        why = str(error) if isinstance(error, Fault) else f"cannot be read: {error}"
        raise SampleError(
            "bad_subtitles",
            f"subtitles '{name}' {why}. A SubRip (.srt) or WebVTT (.vtt) file in UTF-8 is expected. Convert or correct "
            "the file, leave 'subtitles' out of the record, or set prompt.subtitles=false.",
        ) from error


def cues_within(cues: Sequence[Cue], part: Part, timeline: Timeline) -> tuple[Cue, ...]:
    """The subtitles that are shown at some time of the clip, at one of the moments, or during the whole video.

    ``cues`` are all of the file's, in seconds on a player's clock, which begins with the first sound or picture.

    Returns:
        Those of the part, in seconds since the first frame; of speech before it, at 0. Without a start or an end it
        goes to where the file does: sound may begin before the first picture and go on after the last one.
    """
    moved = [Cue(cue.start + timeline.clock_zero, cue.end + timeline.clock_zero, cue.text) for cue in cues]
    if part.times:
        shown = [cue for cue in moved if any(cue.start <= time < cue.end or time == cue.start for time in part.times)]
    else:
        start = timeline.clock_zero if part.start is None else part.start
        last = max(timeline.end, timeline.clock_end)
        end = last if part.end is None else min(part.end, last)
        shown = [cue for cue in moved if cue.start < end and (cue.end > start or cue.start >= start)]
    return tuple(Cue(max(0.0, cue.start), max(0.0, cue.end), cue.text) for cue in shown)


def _cues(text: str, kind: str) -> tuple[Cue, ...]:
    # Files that were put together have such marks in between.
    lines = _LINE_END.split(text.replace("\ufeff", "").lstrip(" \t\r\n"))
    read, plain = (read_vtt, plain_vtt) if kind == "vtt" else (read_srt, plain_srt)
    cues = [Cue(one.start / 1000, one.end / 1000, plain("\n".join(one.lines))) for one in read(lines)]
    for cue in cues:
        if cue.end < cue.start:
            raise Fault(f"have one that begins at {cue.start:g} s and ends at {cue.end:g} s")
    return tuple(sorted((cue for cue in cues if cue.text), key=lambda cue: (cue.start, cue.end)))


_LINE_END = re.compile(r"\r\n|\r|\n")  # as in WebVTT: a form feed or U+2028 stays within its line
_NUMBER = re.compile(r"\s*(\d{1,9})\s*", re.ASCII)
# A fraction of three digits, or of zeros: FFmpeg takes ",50" for 0.050 s, pysubs2 for 0.500 s, and there are tools that
# count frames in it. The position of the text may follow the times (X1:40 in SubRip, align:start in WebVTT).
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


def read_srt(lines: Sequence[str]) -> list[Written]:
    """The subtitles of a SubRip file: each a number, times, and the text up to the next number.

    Text may hold empty lines, as for FFmpeg.

    Raises:
        Fault: a line is neither.
    """
    found: list[Written] = []
    number = None
    above: list[int] = []  # of the lines with words since the last times
    for index, line in enumerate(lines):
        if times := _SRT_TIMES.fullmatch(line):
            number = _number_above(lines, above, index, number)
            text = above[:-1]
            if found:
                found[-1].lines += [lines[above_index] for above_index in text]
            elif text:
                _refuse(lines, text[0], "before the first times")
            found.append(Written(*_milliseconds(times)))
            above = []
        elif _meant_as_times(line, _is_number(lines, index - 1, number)):
            _refuse(lines, index, "where times like 00:01:02,345 --> 00:01:04,000 are expected")
        elif line.strip():
            above.append(index)
    if not found:
        raise Fault("hold no times")
    found[-1].lines += [lines[above_index] for above_index in above]
    return found


def _meant_as_times(line: str, expected: bool) -> bool:
    """Whether a line is mistyped or misread times: "0:05 -> 0:06", "00:00:0l,000 --> 00:00:02,000".

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


def _is_number(lines: Sequence[str], index: int, last: int | None) -> bool:
    """Whether a line is a subtitle's number, as far as it can be distinguished from a text such as "1984"."""
    match = _NUMBER.fullmatch(lines[index]) if index >= 0 else None
    return match is not None and (int(match[1]) - 1 == last or index == 0 or not lines[index - 1].strip())


def _number_above(lines: Sequence[str], above: Sequence[int], index: int, last: int | None) -> int:
    """The number that the times in line ``index`` stand below. It must be distinguished from a text such as "1984"."""
    match = _NUMBER.fullmatch(lines[above[-1]]) if above else None
    if match is None:
        _refuse(lines, index, "without a number above")
    number, at = int(match[1]), above[-1]
    is_separate = at + 1 == index and (at == 0 or not lines[at - 1].strip())
    if last is not None and number != last + 1 and not is_separate:
        _refuse(lines, at, f"which may be a text or a number: {last + 1}, or an empty line before it, is expected")
    return number


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
    """The indices of each block's lines. Times stand in its first or second line; others begin the next block."""
    block: list[int] = []
    has_times = False
    for index in range(start, len(lines)):
        line = lines[index]
        if block and (not line or ("-->" in line and (has_times or len(block) > 1))):
            yield block
            block, has_times = [], False
        if line:
            block.append(index)
            has_times |= "-->" in line
    if block:
        yield block


def _cue_of(lines: Sequence[str], block: Sequence[int]) -> Written | None:
    """The subtitle of a block; None of a note, a style or a region."""
    for count, index in enumerate(block[:2], 1):
        if times := _VTT_TIMES.fullmatch(lines[index]):
            _refuse_times(lines, block[count:], expected=False)
            return Written(*_milliseconds(times), [lines[index] for index in block[count:]])
    if _VTT_BESIDE.fullmatch(lines[block[0]]):
        return None
    _refuse_times(lines, block, expected=True)
    _refuse(lines, block[0], "without times: an empty line ends a text")


def _refuse_times(lines: Sequence[str], block: Sequence[int], expected: bool) -> None:
    for index in block:
        if "-->" in lines[index] or _meant_as_times(lines[index], expected):
            _refuse(lines, index, "where times like 01:02.345 --> 01:04.000 are expected")


def _skip_head(lines: Sequence[str]) -> int:
    """The index of the first line behind the header."""
    for index, line in enumerate(lines[1:], 1):
        if not line or "-->" in line:
            return index
        if not _VTT_MAP.match(line):
            continue
        # RFC 8216, 3.5: a time in ticks of 1/90000 s equals a local time; nothing moves if they agree
        parts = _VTT_MAP_PARTS.fullmatch(line)
        ticks, *local = (int(part or 0) for part in parts.groups()) if parts else (-1, 0, 0, 0, 0)
        if ticks != 90 * _total(*local):
            why = "which moves all times to the clock of a stream; delete it if they count from the video's beginning"
            _refuse(lines, index, why)
    return len(lines)


def _milliseconds(times: re.Match[str]) -> tuple[int, int]:
    parts = [int(part or 0) for part in times.groups()]
    return _total(*parts[:4]), _total(*parts[4:])


def _total(hours: int, minutes: int, seconds: int, milliseconds: int) -> int:
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + milliseconds


def _refuse(lines: Sequence[str], index: int, why: str) -> NoReturn:
    raise Fault(f"have '{lines[index].strip()[:60]}' in line {index + 1}, {why}")


# SubRip has five tags, players know line breaks too; "<laughs>" and "a <b and c> d" are words.
_SRT_TAGS = re.compile(r"</?[bius]\s*>|</?font(?:\s[^<>]*)?>", re.IGNORECASE)
# W3C WebVTT, 6.4: tags with classes (<c.yellow>), those with a name (<lang en>), timestamps (<00:01.500>)
_VTT_TAGS = re.compile(
    r"</?(?:[cibu]|ruby|rt|lang|v)(?:\.[^\s<>]*)?\s*>|<lang(?:\.[^\s<>]*)?\s[^<>]*>|<(?:\d+:)?\d\d:\d\d\.\d{3}>",
    re.IGNORECASE | re.ASCII,
)
_SPEAKER = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]*)>", re.IGNORECASE)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
# {\an8}, which SubRip files have from another format
_OVERRIDES = re.compile(r"\{\\[^{}]*\}")


def plain_srt(text: str) -> str:
    """The words of a text in SubRip, on one line."""
    return _words(_SRT_TAGS.sub("", text))


def plain_vtt(text: str) -> str:
    """The words of a text in WebVTT, on one line, after the speaker's name: ``Roger: Hello.``"""
    text = _SRT_TAGS.sub("", _VTT_TAGS.sub("", text))
    words = _words(_SPEAKER.sub("", text), html.unescape)
    named = _SPEAKER.sub(lambda match: f" {match[1].strip()}: " if match[1].strip() else "", text)
    return words and _words(named, html.unescape)


def _words(text: str, decode: Callable[[str], str] = str) -> str:
    return " ".join(decode(_OVERRIDES.sub("", _BREAK.sub(" ", text))).split())
