"""Subtitles: plain texts and their seconds by hand, those of a part of the video, faults with their reason."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.refusals import refused
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.sampling import WHOLE, Part, Timeline
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import (
    _LINE_END,
    Fault,
    Written,
    cues_within,
    plain_srt,
    plain_vtt,
    read_srt,
    read_subtitles,
    read_vtt,
)
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
    with refused("bad_subtitles", rf"subtitles '{name}' {words}.* in UTF-8 is expected\. Convert or"):
        read(tmp_path, text, name)


def test_the_size_is_limited(tmp_path: Path) -> None:
    assert read(tmp_path, SRT, max_subtitle_bytes=len(SRT)) == SRT_CUES
    with refused("bad_subtitles", f"larger than media.max_subtitle_bytes={len(SRT) - 1}"):
        read(tmp_path, SRT, max_subtitle_bytes=len(SRT) - 1)


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


@pytest.mark.usefixtures("kept_templates")
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


V_ONE, V_TWO = "00:01.000 --> 00:02.000", "00:00:03.000 --> 1:00:04.000"
ONE, TWO = "00:00:01,000 --> 00:00:02,000", "00:00:03,000 --> 00:00:04,000"


def written(text: str, kind: str) -> list[tuple[int, str]]:
    """Beginnings in milliseconds, and lines."""
    found: list[Written] = (read_vtt if kind == "vtt" else read_srt)(_LINE_END.split(text))
    return [(one.start, "|".join(line.strip() for line in one.lines)) for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"1\n{ONE}\nHello\n\nWorld\n\n2\n{TWO}\nBye", [(1000, "Hello|World"), (3000, "Bye")]),
        (f"1\n{ONE}\n\nHello\n\n2\n{TWO}\n\n", [(1000, "Hello"), (3000, "")]),
        (f"1\n{ONE}\n\n2\n{TWO}\nBye", [(1000, ""), (3000, "Bye")]),
        (f"1\n{ONE}\n1984\n\n2001\n\n7\n{TWO}\n42", [(1000, "1984|2001"), (3000, "42")]),
        (f"1\n{ONE}\nHello\n2\n{TWO}\nBye", [(1000, "Hello"), (3000, "Bye")]),  # no empty line
        (f"1\n\n{ONE}\n\nHello\n\n2\n\n{TWO}\n\nBye", [(1000, "Hello"), (3000, "Bye")]),  # too many of them
        (f" 1 \n{ONE}  \n\t\nHello\n \n 2\n {TWO} X1:40 X2:-6 Y1:1 Y2:2\nBye", [(1000, "Hello"), (3000, "Bye")]),
        ("9\n0:0:1.000-->0:00:2.500\nHello", [(1000, "Hello")]),
        ("1\n100:00:01,000 --> 101:99:00,000 line:90% align:start\nx --> y", [(360_001_000, "x --> y")]),
    ],
)
def test_subrip(text: str, expected: list[tuple[int, str]]) -> None:
    assert (
        written(text, "srt")
        == written(text.replace("\n", "\r\n"), "srt")
        == written(text.replace("\n", "\r"), "srt")
        == expected
    )


CLOCKS = ["10:30 we leave", "12:30:45.5 was the time", "10:30 - 11:30 lunch", "It is 5:30 -> 6:00", "1 -> 2"]


@pytest.mark.parametrize("text", CLOCKS)
def test_texts_that_name_times(text: str) -> None:
    """Wherever in a text they are words; directly below a number they would stand where times do."""
    srt = f"1\n{ONE}\n{{}}\nSo\n\n{{}}\n1984\n{{}}\n\n3\n{TWO}\n{{}}"
    words = [f"{text}|So|{text}|1984|{text}", text]
    assert written(srt.replace("{}", text), "srt") == list(zip([1000, 3000], words, strict=True))
    assert written(f"WEBVTT\n\n{V_ONE}\n{text}\nSo\n{text}", "vtt") == [(1000, f"{text}|So|{text}")]
    for number in ("\n2", "\n7", "2"):
        with pytest.raises(Fault, match=f"have '{text}' in line ., where times like"):
            written(f"1\n{ONE}\nSo\n{number}\n{text}", "srt")
    with pytest.raises(Fault, match=f"have '{text}' in line ., (where times like|without times)"):
        written(f"WEBVTT\n\n{V_ONE}\nSo\n\n{text}", "vtt")


@pytest.mark.parametrize("text", ["Score 3:2 --> goal", "Step 1 --> Step 2", "--> 2", "x -->"])
def test_an_arrow_in_a_subrip_text(text: str) -> None:
    assert written(f"1\n{ONE}\n{text}\nSo", "srt") == [(1000, f"{text}|So")]
    with pytest.raises(Fault, match=f"have '{text}' in line 6, where times like"):
        written(f"WEBVTT\n\n{V_ONE}\nSo\n\n{text}", "vtt")


@pytest.mark.parametrize(
    "text",
    [
        *("5:30 -> 6:00", "0:05 → 0:06 x", "00:00:05,000 00:00:06,000", "00:00:05,000 - 00:00:06,000"),
        *("00:00:05,000 –> 00:00:06,000", "00:00:0l,000-->00:00:0b,000", "00:00:05,000 -->", "l0 --> 2O"),
    ],
)
def test_two_times_are_nowhere_a_text(text: str) -> None:
    with pytest.raises(Fault, match=f"have '{text}' in line 4, where times like"):
        written(f"1\n{ONE}\nSo\n{text}\nLost", "srt")
    with pytest.raises(Fault, match=f"have '{text}' in line 5, where times like"):
        written(f"WEBVTT\n\n{V_ONE}\nSo\n{text}\nLost", "vtt")


@pytest.mark.parametrize("zeros", ["0", "00", "000"])
def test_no_fraction_is_none_however_many_zeros_it_has(zeros: str, tmp_path: Path) -> None:
    import av

    (tmp_path / "a.srt").write_text(f"1\n0:00:01,{zeros} --> 0:00:02,{zeros}\nHi\n")
    assert written((tmp_path / "a.srt").read_text(), "srt") == [(1000, "Hi")]
    assert written(f"WEBVTT\n\n00:01.{zeros} --> 00:02.{zeros}\nHi", "vtt") == [(1000, "Hi")]
    with av.open(str(tmp_path / "a.srt")) as container:
        assert [(packet.pts, packet.duration) for packet in container.demux() if packet.size] == [(1000, 1000)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # an empty subtitle beside one that cannot be read
        (
            f"1\n{ONE}\n\nHi\n\n2\n00:00:0l,000 --> 00:00:04,000\nLost",
            "have '00:00:0l,000 --> 00:00:04,000' in line 7, wh",
        ),
        (f"1\n{ONE}\n\nHi\n\n{TWO}\nLost", "in line 6, without a number above"),
        (f"1\n{ONE}\nHi\n\n2a\n{TWO}\nLost", "in line 6, without a number above"),
        (f"{ONE}\nHi", "in line 1, without a number above"),
        (
            f"1\n{ONE}\nHi\n1984\n{TWO}\nBye",
            "have '1984' in line 4, which may be a text or a number: 2, or an empty line",
        ),
        (f"1\n{ONE}\nHi\n\n1984\n\n{TWO}\nBye", "have '1984' in line 5, which may be"),
        (f"1\n{ONE}\nHi\n\n2\n00:00:05,000 -> 00:00:06,000\nLost", "in line 6, where times like"),
        (f"1\n{ONE}\nHi\n\n2\n00:00:06 --> 00:00:07\nLost", "in line 6, where times like"),
        (f"1\n{ONE} Lost\nHi", "in line 2, where times like"),
        ("1\n00:00:01,5 --> 00:00:02,500\nHi", "in line 2, where times like 00:01:02,345"),  # 1.005 s for FFmpeg
        ("1\n00:00:01,50 --> 00:00:02,00\nHi", "in line 2, where times like"),  # 1.5 s for pysubs2, 1.05 s for FFmpeg
        ("1\n00:00:01,0000 --> 00:00:02,500\nHi", "in line 2, where times like"),
        ("1\n00:01,000 --> 00:02,500\nHi", "in line 2, where times like"),
    ],
)
def test_subrip_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(Fault, match=words):
        written(text, "srt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WEBVTT", []),  # nothing is said
        ("WEBVTT\n\nNOTE\nnothing\n\n\n", []),
        (f"WEBVTT - x\nKind: captions\nLanguage: en\n\n{V_ONE}\nHi", [(1000, "Hi")]),
        (f"WEBVTT\tx\n{V_ONE}\nHi\n\n\n\n{V_TWO} align:start position:0%\nyo\nyo", [(1000, "Hi"), (3000, "yo|yo")]),
        (f"WEBVTT\n\n{V_ONE}\n\n{V_TWO}\nBye", [(1000, ""), (3000, "Bye")]),
        # a line of spaces is no empty line: so YouTube writes
        (f"WEBVTT\n\n{V_ONE}\n \nHi\n\n{V_TWO}\nHi\n \n\n", [(1000, "|Hi"), (3000, "Hi|")]),
        (
            f"WEBVTT\n\nSTYLE\n::cue {{ }}\n\nREGION \nid:a\n\nNOTE 0:01 --> x\n0:05 -> 0:06\n\na\n{V_ONE}\nHi",
            [(1000, "Hi")],
        ),
        (f"WEBVTT\n\n{V_ONE}\nNOTE this\n\nSTYLE\n{V_TWO}\nREGION", [(1000, "NOTE this"), (3000, "REGION")]),
        (f"WEBVTT\n\n{V_ONE}\nHi\n{V_TWO}\nBye", [(1000, "Hi"), (3000, "Bye")]),
        (f"WEBVTT\n\n{V_ONE}\na\x0cb\u2028\u2028c", [(1000, "a\x0cb\u2028\u2028c")]),
        (f"WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:90000,LOCAL:00:00:01.000\n\n{V_ONE}\nHi", [(1000, "Hi")]),
        (f"WEBVTT\nX-TIMESTAMP-MAP=LOCAL:00:00.000,MPEGTS:0\n\n{V_ONE}\nHi", [(1000, "Hi")]),
    ],
)
def test_webvtt(text: str, expected: list[tuple[int, str]]) -> None:
    assert written(text, "vtt") == written(text.replace("\n", "\r\n"), "vtt") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"WEBVTTX\n\n{V_ONE}\nHi", "do not begin with WEBVTT"),
        ("WEBVTT\n\nnothing", "have 'nothing' in line 3, without times: an empty line ends a text"),
        (f"WEBVTT\n\n{V_ONE}\nHi\n\nWorld\n\n{V_TWO}\nBye", "have 'World' in line 6, without times"),
        (f"WEBVTT\n\n{V_ONE}\n\nHi", "have 'Hi' in line 5, without times"),
        (f"WEBVTT\n\n{V_ONE}\n\n\n00:03,000 --> 00:04,000\nLost", "in line 6, where times like 01:02.345"),
        (f"WEBVTT\n\n{V_ONE}\nHi\n\n00:05.000 -> 00:06.000\nLost", "in line 6, where times like"),
        (f"WEBVTT\n\n{V_ONE}\nHi\n00:05.000 -> 00:06.000\nLost", "in line 5, where times like"),
        (f"WEBVTT\n\n{V_ONE}\nHi\n\nNOTE x\n\nmore", "have 'more' in line 8, without times"),
        (f"WEBVTT\n\nx\ny\n{V_ONE}\nHi", "have 'x' in line 3, without times"),
        ("WEBVTT\n\n00:01.5 --> 00:02.500\nHi", "in line 3, where times like"),  # 1.005 s for FFmpeg
        ("WEBVTT\n\n00:61.000 --> 00:62.000\nHi", "in line 3, where times like"),
        ("WEBVTT\n\n1\n00:01.000 --> x\nHi", "in line 4, where times like"),
        (f"WEBVTT\n\n{V_ONE} Lost\nHi", "in line 3, where times like"),
        (
            f"WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:900000,LOCAL:00:00:00.000\n\n{V_ONE}\nHi",
            "in line 2, which moves all times",
        ),
        (f"WEBVTT\nX-TIMESTAMP-MAP=here\n\n{V_ONE}\nHi", "in line 2, which moves all times"),
    ],
)
def test_webvtt_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(Fault, match=words):
        written(text, "vtt")


@pytest.mark.parametrize(
    ("written", "srt", "vtt"),
    [
        ("<laughs> Hi <Music playing>", "<laughs> Hi <Music playing>", "<laughs> Hi <Music playing>"),
        ("i<n and n>3, a <b and c> d, <3", "i<n and n>3, a <b and c> d, <3", "i<n and n>3, a <b and c> d, <3"),
        ("<I>x</i> <b>y</b ><u>z</u><s>!</s>", "x yz!", "x yz!"),
        ('<font color="#ff0000" size=5>red</font>{\\an8}', "red", "red"),
        ("one<br>two<br />three", "one two three", "one two three"),
        ("a &lt;b&gt; &amp; c", "a &lt;b&gt; &amp; c", "a <b> & c"),
        ("<c.yellow.bg_x>a</c> <00:01.500>b<01:00:01.500><lang en-GB>c</lang>", None, "a bc"),
        ("<ruby>漢<rt>kan</rt></ruby>&nbsp;<i.foreign>x</i>", None, "漢kan x"),
        ("<v Roger>Hi</v>", None, "Roger: Hi"),
        ("<v.loud Mary Ann>Hi\n<v Tom &amp; Bob>\nHo", None, "Mary Ann: Hi Tom & Bob: Ho"),
        ("<v Roger><i> &nbsp;</i></v>", None, ""),
        ("<v>Hi</v>", None, "Hi"),
    ],
)
def test_markup(written: str, srt: str | None, vtt: str) -> None:
    assert plain_vtt(written) == vtt
    assert srt is None or plain_srt(written) == srt


SPOKEN = ("Hello", "- Yes.\n- No.", "1984 was a year", "a <b and c> d", "<i>so</i>", "", "é 漢字 🙂", "it's 3:16")


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_ffmpeg_reads_the_same(tmp_path: Path, kind: str) -> None:
    """Times and texts of files that are as they should be."""
    import av

    numbers = random.Random(f"subtitles/{kind}")
    for case in range(20):
        start, blocks, expected = 0, [], []
        for number in range(numbers.randrange(1, 30)):
            start += numbers.randrange(1, 400_000)
            end = start + numbers.randrange(1, 5000)
            text = numbers.choice(SPOKEN)
            point = "," if kind == "srt" else "."
            times = " --> ".join(
                f"{at // 3_600_000:02d}:{at // 60_000 % 60:02d}:{at // 1000 % 60:02d}{point}{at % 1000:03d}"
                for at in (start, end)
            )
            blocks.append(f"{number + 1}\n{times}\n{text}\n")
            expected.append((start, end, text.split("\n") if text else []))
        path = tmp_path / f"{case}.{kind}"
        path.write_text(("WEBVTT\n\n" if kind == "vtt" else "") + "\n".join(blocks))
        ours = (read_vtt if kind == "vtt" else read_srt)(_LINE_END.split(path.read_text()))
        assert [(one.start, one.end, [line for line in one.lines if line]) for one in ours] == expected
        with av.open(str(path)) as container:
            packets = [packet for packet in container.demux() if packet.size]
            theirs = [
                (packet.pts, packet.pts + packet.duration, bytes(packet).decode().split("\n")) for packet in packets
            ]
        assert theirs == [one for one in expected if one[2]]


def test_what_is_put_together(tmp_path: Path) -> None:
    """Marks of encodings between two files that were joined; a file without a word is none that is broken."""
    path = tmp_path / "a.srt"
    path.write_text(f"\ufeff1\n{ONE}\nHi\n\n\ufeff1\n{TWO}\nBye\n")
    assert [cue.text for cue in read_subtitles(str(path), path.name, MediaSettings())] == ["Hi", "Bye"]
    path = tmp_path / "a.vtt"
    path.write_text("WEBVTT\n")
    assert read_subtitles(str(path), path.name, MediaSettings()) == ()


def test_long_lines_take_no_longer() -> None:
    """Patterns look at each character a few times: with squares of that this would not end."""
    many = 300_000
    for text in ("<v" + " " * many, "<font" + " " * many, "{\\" * many, "<" * many, "&" * many):
        assert len(plain_vtt(text).split()) == len(plain_srt(text).split()) == 1
    for text in ("1:" + "1" * many, "1:1" + " -" * many, " " * many + "x"):
        assert len(written(f"1\n{ONE}\n{text}", "srt")) == 1
    for text in (f"{ONE}" + " a:b" * many + " c", f"{ONE}{' ' * many}c", "1" * many + " --> "):
        with pytest.raises(Fault, match="where times like"):
            written(f"1\n{text}", "srt")
