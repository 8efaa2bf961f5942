"""Subtitles: plain texts and their seconds by hand, those of a part of the video, faults with their reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.selection import WHOLE, Part, Timeline
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import cues_within, read_subtitles
from vlm_pg.types import Cue, DecodedMedia, MediaRef

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>Hello</i> {\\an8}there &amp; you,
<font color="#ff0000">second</font> line

2
00:00:04,000 --> 00:00:05,250 X1:40 X2:600
a < b > c
42

3
00:00:03,000 --> 00:00:03,900

4
01:00:00,007 --> 01:00:01,000
2001
"""
SRT_CUES = (
    Cue(1.0, 2.5, "Hello there &amp; you, second line"),
    Cue(4.0, 5.25, "a < b > c 42"),
    Cue(3600.007, 3601.0, "2001"),
)
VTT = """WEBVTT - made by hand

STYLE
::cue { color: red }

NOTE not shown

first
00:01.000 --> 00:02.000 align:start position:10%
<v Roger>Hi <c.yellow>there</c> <00:01.500>you &lt;b&gt; &amp; me

NOTE
neither
this

00:00:00.500 --> 01:00:04.000
- one
- two
"""
VTT_CUES = (Cue(0.5, 3604.0, "- one - two"), Cue(1.0, 2.0, "Roger: Hi there you <b> & me"))


def read(folder: Path, text: str | bytes, name: str = "a.srt", **settings: int) -> tuple[Cue, ...]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_subtitles(str(folder / name), name, MediaSettings(**settings))


@pytest.mark.parametrize(("name", "text", "cues"), [("a.srt", SRT, SRT_CUES), ("a.vtt", VTT, VTT_CUES)])
def test_texts_and_seconds(tmp_path: Path, name: str, text: str, cues: tuple[Cue, ...]) -> None:
    for written in (
        text.encode(),
        text.encode("utf-8-sig"),
        text.encode("utf-16"),
        text.replace("\n", "\r\n").encode(),
        b"\n\n" + text.encode() + b"\n\n\n",
    ):
        assert read(tmp_path, written, name) == cues


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\ncaf\xe9\n", r"are not text in UTF-8 \(byte 35\)"),
        ("a.srt", b"\xff\xfe\x31\x00\x00\xd8", "are not text in UTF-16"),
        ("a.srt", "", "hold no times"),
        ("a.vtt", "", "do not begin with WEBVTT"),
        ("a.vtt", SRT, "do not begin with WEBVTT"),
        ("a.srt", "[Script Info]\nTitle: x\n\nDialogue: y\n", "hold no times"),
        ("a.srt", "A film\n\n" + SRT, "have 'A film' in line 1, before the first times"),
        ("a.srt", "1\n00:00:05,000 --> 00:00:02,000\nx\n", r"have one that begins at 5 s and ends at 2 s"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    with pytest.raises(SampleError, match=rf"subtitles '{name}' {words}.* in UTF-8 is expected\. Convert or") as got:
        read(tmp_path, text, name)
    assert got.value.reason == "bad_subtitles"


def test_the_size_is_limited(tmp_path: Path) -> None:
    assert read(tmp_path, SRT, max_subtitle_bytes=len(SRT)) == SRT_CUES
    with pytest.raises(SampleError, match=f"larger than media.max_subtitle_bytes={len(SRT) - 1}") as got:
        read(tmp_path, SRT, max_subtitle_bytes=len(SRT) - 1)
    assert got.value.reason == "bad_subtitles"


CUES = (Cue(1.0, 2.0, "a"), Cue(2.0, 4.0, "b"), Cue(3.0, 3.0, "point"), Cue(9.5, 12.0, "end"), Cue(11.0, 12.0, "late"))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (WHOLE, ["a", "b", "point", "end"]),  # the video ends at 10 s
        (Part(2.0, 3.0), ["b"]),
        (Part(2.0, 3.1), ["b", "point"]),
        (Part(1.5, 9.0), ["a", "b", "point"]),
        (Part(4.0, 9.5), []),
        (Part(4.0, 99.0), ["end"]),
        (Part(None, 1.5), ["a"]),
        (Part(3.0, None), ["b", "point", "end"]),
        (Part(times=(0.5, 2.0, 9.9)), ["b", "end"]),
        (Part(times=(1.0, 3.0)), ["a", "b", "point"]),
        (Part(times=(0.9, 4.0)), []),
    ],
)
def test_those_of_a_part(part: Part, expected: list[str]) -> None:
    timeline = Timeline([index / 10 for index in range(100)], 10.0, 10.0, 0.0)
    assert [cue.text for cue in cues_within(CUES, part, timeline)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_they_come_with_their_video(media_dir: Path, tmp_path: Path, workers: int) -> None:
    """Through the loader, in a worker or not: subtitles of a clip, and of a video whose record names none."""
    video = tmp_path / "clips" / "a.mkv"
    video.parent.mkdir()
    video.write_bytes((media_dir / "flipping_a_pancake.mkv").read_bytes())
    (tmp_path / "a.srt").write_text(SRT)
    (tmp_path / "b.srt").write_bytes(b"\xff")
    refs = [
        MediaRef("video", "clips/a.mkv", 3.5, 6.0, subtitles="a.srt"),
        MediaRef("video", "clips/a.mkv", times=(1.5, 3.0), subtitles="clips/../a.srt"),
        MediaRef("video", "clips/a.mkv"),
        MediaRef("video", "clips/a.mkv", subtitles="b.srt"),
        MediaRef("video", "clips/a.mkv", subtitles="c.srt"),
        MediaRef("video", "clips/a.mkv", subtitles="clips/a.mkv"),
        MediaRef("video", "clips/a.mkv", subtitles="../a.srt"),
        MediaRef("video", "clips/a.mkv", subtitles="https://host/a.srt"),
    ]
    with MediaLoader(MediaSettings(workers=workers, max_frames=4), tmp_path) as loader:
        loaded = loader.load(refs)
    expected = [SRT_CUES[1:2], SRT_CUES[:1], (), "bad_subtitles", "missing_media", "unsupported_media", "outside_root",
                "remote_media"]  # fmt: skip
    got = [item.subtitles if isinstance(item, DecodedMedia) else item.reason for item in loaded]
    assert got == expected
    assert "subtitles path 'clips/a.mkv' ends in '.mkv'. Subtitles may end in .srt, .vtt." in str(loaded[5])
    with MediaLoader(MediaSettings(workers=workers, max_frames=4), tmp_path, subtitles=False) as loader:
        assert all(isinstance(item, DecodedMedia) and not item.subtitles for item in loader.load(refs))
