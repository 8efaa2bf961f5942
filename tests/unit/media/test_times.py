"""Times that do not say when a frame is shown, and subtitles on a player's clock: read as a player does, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import number_of, picture
from tests.support.odd_clips import at_storage_times, decoded, encode, read_index, remux
from tests.support.refusals import refused
from tests.support.whole_decode import decode_whole
from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import header_of, open_video
from vlm_pg.media.decode_file import decode_file, decode_video, probe_file
from vlm_pg.media.sampling import WHOLE, Part
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.video_decoders import DecordDecoder, TorchCodecDecoder
from vlm_pg.types import Cue, DecodedMedia

RATE = 40  # milliseconds a frame


@pytest.mark.parametrize("late", [0, 1540], ids=["same-clock", "between"])
@pytest.mark.parametrize(("codec", "suffix"), [("libx264", "ts"), ("mpeg2video", "ts"), ("mpeg2video", "vob")])
def test_a_clock_that_goes_back(codec: str, suffix: str, late: int, tmp_path: Path) -> None:
    """Two files joined byte by byte: the frames of the second lie among those of the first."""
    clock = 1000 if codec == "libx264" else 25
    tick = RATE * clock // 1000
    parts = [
        encode(
            tmp_path / f"{first}.{suffix}",
            [start + tick * position for position in range(40)],
            codec,
            first,
            clock,
            bf="2",
        )
        for first, start in ((0, 0), (500, late * clock // 1000))
    ]
    (tmp_path / "joined.mkv").write_bytes(b"".join(part.read_bytes() for part in parts))
    with refused("corrupt_media", r"clock goes back from \d\.\d{3} s to \d\.\d{3} s, .* Remux it"):
        decode_video(tmp_path / "joined.mkv", MediaSettings(), 28)


B_FRAMES = {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0"}
OPEN_264 = {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0:open-gop=1"}
OPEN_265 = {"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=12:bframes=3:b-adapt=0:open-gop=1"}
STORAGE = [
    ("libx264", "mp4", B_FRAMES),
    ("libx264", "mkv", OPEN_264),
    ("libx264", "avi", B_FRAMES),
    ("libx265", "mp4", OPEN_265),
    ("mpeg2video", "mkv", {"bf": "2"}),
    ("mpeg2video", "ts", {"bf": "0"}),  # in doubt for no reason
]


@pytest.mark.parametrize(("codec", "suffix", "options"), STORAGE, ids=lambda value: value if type(value) is str else "")
def test_packets_with_times_of_storage(codec: str, suffix: str, options: dict[str, str], tmp_path: Path) -> None:
    """In AVI, and where a raw stream was put into a container: a player shows frames as they come."""
    path = encode(tmp_path / f"made.{suffix}", list(range(48)), codec, clock=25, **options)
    if suffix in ("mp4", "mkv"):
        path = remux(path, tmp_path / f"raw.{suffix}", at_storage_times)
    assert decoded(path) == list(range(48))
    index = read_index(path)
    assert not index.times_hold and len(index.entries) > 2
    check_reads(path, list(range(48)))
    for decoder in (DecordDecoder, TorchCodecDecoder):
        if suffix in ("mp4", "mkv"):
            with pytest.raises(DecodeFailure, match=r"may carry times of storage, which (decord|torchcodec) takes for"):
                decoder(path, index)


@pytest.mark.parametrize("late", [0, 5000])
def test_few_frames_beside_longer_sound(late: int, tmp_path: Path) -> None:
    """Matroska states how long the whole file is: that is no length of the picture."""
    slides = encode(tmp_path / "a.mp4", [0, 10_000, 20_000], g="1")

    def later(packets: list[Any]) -> list[Any]:
        for packet in packets:
            shift = round(Fraction(late, 1000) / packet.time_base)
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
        return packets

    path = remux(slides, tmp_path / "b.mkv", later, audio_seconds=40.0)
    with open_video(path) as opened:
        assert header_of(*opened).duration_seconds == pytest.approx(40.0, abs=0.2)
    assert decode_video(path, MediaSettings(), 28).frame_seconds == (0.0, 20.0)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with refused("truncated_media"):
        decode_video(path, MediaSettings(), 28)


def check_reads(path: Path, shown: list[int]) -> None:
    """Each frame alone, some together, all: as a player shows them."""
    decoder = PyAVDecoder(path, read_index(path))
    for positions in (
        *([position] for position in range(0, len(shown), 5)),
        [0, 11, 12, len(shown) - 1],
        range(len(shown)),
    ):
        assert [number_of(picture) for picture in decoder.read(list(positions))] == [
            shown[position] for position in positions
        ]


@pytest.mark.parametrize("codec", ["libx264", "ffv1", "libvpx"])
def test_frames_of_equal_times(codec: str, tmp_path: Path) -> None:
    """A clock of milliseconds may give two pictures one time: each of them is shown in its turn."""
    times = [0, 0, 40, 80, 80, 80, 120, 160, 200, 240, 240, 280, 320, 320]
    path = encode(tmp_path / "a.mkv", times, codec, **({"bf": "0", "g": "5"} if codec != "ffv1" else {}))
    assert decoded(path) == list(range(14))
    index = read_index(path)
    assert [index.shares_its_time(position) for position in range(7)] == [True, True, False, True, True, True, False]
    assert index.entries[0].pts == 0
    assert not {80, 240, 320} & {entry.pts for entry in index.entries}, "which of the frames of that time is it?"
    check_reads(path, list(range(14)))
    with pytest.raises(DecodeFailure, match="frames of equal times, which decord does not tell apart"):
        DecordDecoder(path, index)


@pytest.mark.parametrize("suffix", ["mkv", "ts", "mp4"])
@pytest.mark.parametrize(
    ("codec", "options"),
    [("libx264", OPEN_264), ("libx265", OPEN_265), ("mpeg2video", {"bf": "2"}), ("mpeg4", {"bf": "2"})],
    ids=lambda value: value if type(value) is str else "",
)
def test_a_stream_cut_inside_an_open_group(codec: str, options: dict[str, str], suffix: str, tmp_path: Path) -> None:
    """It begins with a key frame, and pictures shown before that need others that are gone: players leave them out."""
    whole = encode(tmp_path / f"a.{suffix}", list(range(48)), codec, clock=25, **options)
    path = remux(whole, tmp_path / f"b.{suffix}", from_second_key)
    shown = decoded(path)
    assert shown == list(range(12, 48))
    assert len(read_index(path).pts) == len(shown)
    check_reads(path, shown)


def from_second_key(packets: list[Any]) -> list[Any]:
    keys = [position for position, packet in enumerate(packets) if packet.is_keyframe]
    cut = packets[keys[1] :]
    assert min(packet.pts for packet in cut) < cut[0].pts, "no picture is shown before the key frame"
    return cut


@pytest.mark.parametrize(("codec", "options"), [("libx265", OPEN_265), ("libx264", OPEN_264)], ids=["hevc", "h264"])
def test_pictures_left_out_that_have_no_time(codec: str, options: dict[str, str], tmp_path: Path) -> None:
    """Matroska has no times below 0. HEVC says of a picture that no decoder shows it; of H.264 that is not certain."""
    whole = encode(tmp_path / "a.mkv", list(range(48)), codec, clock=25, **options)
    path = remux(whole, tmp_path / "b.mkv", from_second_key)
    data = bytearray(path.read_bytes())
    time = data.index(b"\xe7", data.index(b"\x1f\x43\xb6\x75"))  # of the only cluster, in milliseconds
    assert data[time + 1] == 0x82 and data.count(b"\x1f\x43\xb6\x75") == 1 + data.count(b"\x53\xab\x84\x1f\x43\xb6\x75")
    data[time + 2 : time + 4] = bytes(2)
    path.write_bytes(data)
    shown = decoded(path)
    assert shown == list(range(12, 48))
    if codec == "libx264":
        with pytest.raises(DecodeFailure, match="no presentation timestamp"):
            read_index(path)
        return
    assert read_index(path).pts == tuple(range(0, 36 * RATE, RATE))
    check_reads(path, shown)


@pytest.mark.parametrize("suffix", ["mkv", "ts"])
def test_leading_pictures_that_need_nothing_earlier_are_shown(suffix: str, tmp_path: Path) -> None:
    """HEVC's RADL pictures: stored behind the key frame, shown before it, made from it alone."""
    radl = {"x265-params": OPEN_265["x265-params"].replace("open-gop=1", "open-gop=0:min-keyint=12:scenecut=0:radl=2")}
    whole = encode(tmp_path / f"a.{suffix}", list(range(48)), "libx265", clock=25, **radl)
    path = remux(whole, tmp_path / f"b.{suffix}", from_second_key)
    shown = decoded(path)
    assert shown[-1] == 47 and len(shown) > 24
    check_reads(path, shown)


def test_a_first_group_that_is_closed(tmp_path: Path) -> None:
    """MPEG-2 says in its header of a group that the pictures shown before its key frame need nothing earlier."""
    whole = encode(tmp_path / "a.mkv", list(range(48)), "mpeg2video", clock=25, bf="2")
    path = remux(whole, tmp_path / "b.mkv", from_second_key)
    data = bytearray(path.read_bytes())
    data[data.index(b"\0\0\1\xb8") + 7] |= 0x40
    path.write_bytes(data)
    index, pictures = read_index(path), decode_whole(path).pictures
    assert len(index.pts) == len(pictures) == 38
    assert np.array_equal(PyAVDecoder(path, index).read([0, 1, 2, 37]), np.stack([*pictures[:3], pictures[37]]))


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
