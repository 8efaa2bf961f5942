"""What is said in a video, where its set publishes it in a form of its own: written as WebVTT, which players read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlm_pg.types import Cue

# A reader of subtitle files takes "10:30 -> 11:00" for times that somebody typed.
_OF_CLOCK = re.compile(r":(?=\s{0,9}\d)")


@dataclass(frozen=True)
class Told:
    """Subtitles in the place of their file's path, in seconds since the video's first frame."""

    cues: tuple[Cue, ...]


def as_vtt(cues: Sequence[Cue]) -> str:
    """Subtitles as a WebVTT file: texts on one line each, times in milliseconds.

    Signs that mean something in such files are escaped (W3C WebVTT, 4.2.2), so that every text is read as it is:
    as_vtt([Cue(1.5, 2.0, "a <b>")]) == "WEBVTT\\n\\n00:00:01.500 --> 00:00:02.000\\na &lt;b&gt;\\n".
    """
    return "\n".join(_blocks(cues))


def _blocks(cues: Sequence[Cue]) -> Iterator[str]:
    yield "WEBVTT\n"
    for cue in cues:
        words = " ".join(cue.text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield f"{_clock(cue.start)} --> {_clock(cue.end)}\n{_OF_CLOCK.sub('&#58;', words)}\n"


def _clock(seconds: float) -> str:
    """00:01:02.345"""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}.{milliseconds % 1000:03}"
