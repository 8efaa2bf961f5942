"""Subtitles are on a player's clock, frames on that of the first one: sound that begins earlier or ends later."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import number_of, picture
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.probe import probe_file
from vlm_pg.media.sampling import WHOLE, Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import Cue, DecodedMedia

SETTINGS = MediaSettings(max_frames=4)
TICK = Fraction(1, 1000)


def film(path: Path, seconds: Sequence[float], sound: float = 0.0, held: float = 0.0) -> Path:
    """Numbered pictures at ``seconds``, the last one shown for ``held`` s, beside ``sound`` s of AAC from 0 on."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=25, options={"preset": "ultrafast", "bf": "0", "g": "5"})
        first = picture(0)
        video.height, video.width = first.shape[:2]
        video.codec_context.time_base = TICK
        packets = []
        for number, second in enumerate(seconds):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = round(second / TICK), TICK
            packets += video.encode(frame)
        packets += video.encode(None)
        audio = container.add_stream("aac", rate=16_000) if sound else None
        if held:
            packets[-1].duration = round(held / packets[-1].time_base)
        for packet in packets:
            container.mux(packet)
        for start in range(0, round(sound * 16_000), 1024):
            assert audio is not None
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 16_000, start
            container.mux(audio.encode(silence))
        if audio:
            container.mux(audio.encode(None))
    return path


def words(path: Path, *cues: tuple[float, float, str]) -> str:
    def time(second: float) -> str:
        whole, milli = divmod(round(second * 1000), 1000)
        return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{milli:03d}"

    path.write_text("WEBVTT\n\n" + "".join(f"{time(start)} --> {time(end)}\n{text}\n\n" for start, end, text in cues))
    return str(path)


def shown(path: Path, part: Part, subtitles: str) -> tuple[DecodedMedia, list[tuple[float, float, str]]]:
    """The medium and its subtitles, which are those that a look at the file alone finds."""
    media = decode_file("video", str(path), SETTINGS, 28, part, subtitles)
    facts = probe_file("video", str(path), SETTINGS, 28, part, subtitles)
    assert facts.subtitles == media.subtitles and facts.frame_seconds == media.frame_seconds
    return media, [(round(cue.start, 3), round(cue.end, 3), cue.text) for cue in media.subtitles]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_pictures_that_begin_behind_the_sound(tmp_path: Path, suffix: str) -> None:
    """The first picture is shown at 5 s of the file: what is said then is at its second 0."""
    path = film(tmp_path / f"late.{suffix}", [5 + index / 25 for index in range(100)], sound=9.0)
    subtitles = words(
        tmp_path / "a.vtt", (1, 2, "before"), (4.5, 6, "across"), (7, 8, "two"), (9.01, 9.4, "after"), (12, 13, "never")
    )
    # FFmpeg's MPEG-TS has another zero for each stream, a few hundredths of a second apart
    near = {"rel": 0, "abs": 0.1 if suffix == "ts" else 1e-6}
    for part, expected in (
        (WHOLE, [(0, 0, "before"), (0, 1, "across"), (2, 3, "two"), (4.01, 4.4, "after")]),
        (Part(None, 2.5), [(0, 0, "before"), (0, 1, "across"), (2, 3, "two")]),
        (Part(0.0, 1.5), [(0, 1, "across")]),
        (Part(1.5, 3.9), [(2, 3, "two")]),
        (Part(times=(0.0, 1.5)), [(0, 1, "across")]),
        (Part(times=(1.5, 2.5)), [(2, 3, "two")]),
    ):
        media, got = shown(path, part, subtitles)
        assert [cue[2] for cue in got] == [cue[2] for cue in expected]
        assert [second for cue in got for second in cue[:2]] == pytest.approx(
            [second for cue in expected for second in cue[:2]], **near
        )
        assert number_of(media.frames[0].transpose(1, 2, 0)) == round(media.frame_seconds[0] * 25)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_what_audio_decoders_throw_away_moves_nothing(tmp_path: Path, suffix: str) -> None:
    """AAC has a packet before its first sound; its time is before 0."""
    path = film(tmp_path / f"plain.{suffix}", [index / 25 for index in range(50)], sound=2.0)
    media, _ = shown(path, WHOLE, words(tmp_path / "a.vtt", (0, 0.5, "at once"), (1.25, 1.5, "later")))
    assert media.subtitles == (Cue(0.0, 0.5, "at once"), Cue(1.25, 1.5, "later"))


SLIDES = [(float(second), second + 4.0, f"at {second}") for second in range(0, 70, 5)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_last_picture_that_is_held(tmp_path: Path, suffix: str) -> None:
    path = film(tmp_path / f"slides.{suffix}", [0, 10, 20], held=40.0)
    subtitles = words(tmp_path / "a.vtt", *SLIDES)
    for part, numbers, expected in (
        (WHOLE, [0, 2], SLIDES[:12]),
        (Part(25.0, 58.0), [2, 2], SLIDES[5:12]),
        (Part(30.0, None), [2, 2], SLIDES[6:12]),
        (Part(times=(11.0, 46.0)), [1, 2], [SLIDES[2], SLIDES[9]]),
    ):
        media, got = shown(path, part, subtitles)
        assert [number_of(frame.transpose(1, 2, 0)) for frame in media.frames] == numbers
        assert got == expected
    with pytest.raises(SampleError, match=r"asks for 61 s of video 'slides\..*', which ends at 60\.00 s"):
        shown(path, Part(times=(61.0,)), subtitles)
    assert probe_file("video", str(path), SETTINGS, 28).seconds == 60.0


def test_sound_that_goes_on(tmp_path: Path) -> None:
    """Pictures end at 20 s, sound at 60 s: what is said is heard with the whole video, and in a long clip."""
    path = film(tmp_path / "talk.mp4", [0, 10, 20], sound=59.9)
    subtitles = words(tmp_path / "a.vtt", *SLIDES)
    assert shown(path, WHOLE, subtitles)[1] == SLIDES[:12]
    assert shown(path, Part(5.0, 48.0), subtitles)[1] == SLIDES[1:10]
    assert shown(path, Part(5.0, None), subtitles)[1] == SLIDES[1:12]
