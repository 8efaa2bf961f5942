"""Short videos whose every frame shows its number, in many codecs, containers and ways to be stored.

The number is drawn as black and white squares: ten bits, their complements, four corner squares that tell the picture's
orientation. It survives lossy coding and resizing; a picture that is turned, mixed of two or garbage has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS, SQUARE = 4, 6, 16
# one white corner: the picture is another one after every turn and mirroring
CORNERS = {(0, 0): 1, (0, COLUMNS - 1): 0, (ROWS - 1, 0): 0, (ROWS - 1, COLUMNS - 1): 0}
FRAMES = 48
RATE = 25


def picture(number: int) -> np.ndarray:
    """Frame ``number`` as uint8 [height, width, 3]."""
    bits = [number >> offset & 1 for offset in range(10)]
    inner = iter(bits + [1 - bit for bit in bits])
    squares = [
        [CORNERS[row, column] if (row, column) in CORNERS else next(inner) for column in range(COLUMNS)]
        for row in range(ROWS)
    ]
    plane = np.kron(np.array(squares, dtype=np.uint8) * 219 + 16, np.ones((SQUARE, SQUARE), dtype=np.uint8))
    return np.repeat(plane[..., None], 3, axis=2)


def number_of(pixels: np.ndarray) -> int | None:
    """The number that a picture of any size shows, uint8 [height, width, 3]; None if it shows none."""
    height, width = pixels.shape[:2]
    means = np.empty((ROWS, COLUMNS))
    for row in range(ROWS):
        for column in range(COLUMNS):
            top, left = (row + 0.3) * height / ROWS, (column + 0.3) * width / COLUMNS
            inside = pixels[
                int(top) : int(top + 0.4 * height / ROWS) + 1, int(left) : int(left + 0.4 * width / COLUMNS) + 1
            ]
            means[row, column] = inside.mean()
    if ((means > 90) & (means < 165)).any():
        return None
    squares = (means > 127).astype(int)
    if any(squares[offset] != colour for offset, colour in CORNERS.items()):
        return None
    inner = [squares[row, column] for row in range(ROWS) for column in range(COLUMNS) if (row, column) not in CORNERS]
    if any(bit + other != 1 for bit, other in zip(inner[:10], inner[10:], strict=True)):
        return None
    return int(sum(bit << offset for offset, bit in enumerate(inner[:10])))


@dataclass(frozen=True)
class Clip:
    """How a clip is made. ``first``: the number of the first frame that is shown, where an edit list cuts some away.

    ``options``: of the encoder. ``muxer``: of the container. ``turn``: degrees that a viewer turns the picture by;
    stored pictures are turned the other way, so that it comes out upright. ``patch``: a change of the finished file.
    """

    codec: str
    container: str
    feature: str
    options: Mapping[str, str] = field(default_factory=dict)
    muxer: Mapping[str, str] = field(default_factory=dict)
    pix_fmt: str = "yuv420p"
    variable: bool = False
    start: int = 0
    turn: int = 0
    patch: str = ""
    first: int = 0

    @property
    def name(self) -> str:
        """Codec, container and feature, unique in a table."""
        return f"{self.codec}-{self.container}-{self.feature}"


SUFFIX = {"matroska": ".mkv", "mpegts": ".mkv", "vob": ".mkv", "avi": ".mkv", "flv": ".mkv", "asf": ".mkv"}


def write(clip: Clip, folder: Path, frames: int = FRAMES) -> Path:
    """Encode the clip; what it is called says nothing about the container, where records may not name that one."""
    import av

    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    path = folder / (clip.name + SUFFIX.get(clip.container, f".{clip.container}"))
    with av.open(str(path), "w", format=clip.container, container_options=dict(clip.muxer)) as container:
        stream = container.add_stream(clip.codec, rate=RATE, options=dict(clip.options))
        turned = clip.turn in (90, 270)
        stream.width, stream.height = (64, 96) if turned else (96, 64)
        stream.pix_fmt = clip.pix_fmt
        stream.gop_size = int(clip.options.get("g", 12))
        if clip.turn:
            stream.set_display_rotation(-clip.turn)
        stream.time_base = stream.codec_context.time_base = _time_base(clip)
        for number, pts in zip(range(frames), _times(clip), strict=False):
            stored = np.ascontiguousarray(np.rot90(picture(number), clip.turn // 90))
            frame = av.VideoFrame.from_ndarray(stored, format="rgb24").reformat(format=clip.pix_fmt)
            frame.pts, frame.time_base = pts, _time_base(clip)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    # SVT-AV1, run by root, leaves this thread in real time (SCHED_FIFO), and every process it starts from then on.
    os.sched_setscheduler(0, policy, priority)
    if clip.patch:
        path.write_bytes(_PATCHES[clip.patch](path.read_bytes()))
    return path


def _time_base(clip: Clip) -> Any:
    from fractions import Fraction

    # some codecs of old take no finer clock than their frame rate
    return Fraction(1, 100) if clip.variable else Fraction(1, RATE)


def _times(clip: Clip) -> Iterator[int]:
    time, gaps = clip.start, (4, 3, 9, 4, 17, 4, 5)
    for number in range(10_000):
        yield time
        time += gaps[number % len(gaps)] if clip.variable else 1


def _without_sync_table(data: bytes) -> bytes:
    assert data.count(b"stss") == 1
    return data.replace(b"stss", b"free")


CUT = 7


def _cut_by_edit_list(data: bytes) -> bytes:
    """Show the video from frame ``CUT`` on, as programs that cut do: the entry of ``elst``, lengths with it."""
    offset = data.index(b"elst") + 12
    scale = int.from_bytes(data[data.index(b"mdhd") + 16 :][:4], "big")
    movie_scale = int.from_bytes(data[data.index(b"mvhd") + 16 :][:4], "big")
    duration, media_time = (int.from_bytes(data[offset + at : offset + at + 4], "big") for at in (0, 4))
    duration -= CUT * movie_scale // RATE
    media_time += CUT * scale // RATE
    data = data[:offset] + duration.to_bytes(4, "big") + media_time.to_bytes(4, "big") + data[offset + 8 :]
    for box, at in ((b"tkhd", 24), (b"mvhd", 20)):
        offset = data.index(box) + at
        data = data[:offset] + duration.to_bytes(4, "big") + data[offset + 4 :]
    return data


def _without_cues(data: bytes) -> bytes:
    """Matroska whose index (Cues) and list of offsets (SeekHead) are called padding."""
    for element in (b"\x1c\x53\xbb\x6b", b"\x11\x4d\x9b\x74"):
        offset = data.find(element)
        assert offset >= 0
        size_byte = data[offset + 4]
        # a Void element of the same extent: its id is one byte, so its size takes three bytes more
        length = 8 - size_byte.bit_length() + 1
        size = int.from_bytes(data[offset + 4 : offset + 4 + length], "big") & ((1 << 7 * length) - 1)
        head = 4 + length
        total = head + size
        void = b"\xec" + ((1 << 56) | (total - 9)).to_bytes(8, "big")
        data = data[:offset] + void + data[offset + 9 :]
    return data


_PATCHES = {"no-stss": _without_sync_table, "edit-list": _cut_by_edit_list, "no-cues": _without_cues}
