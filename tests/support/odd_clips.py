"""Clips whose containers say something odd about them: made by remuxing and patching those of ``clips.py``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.support.clips import number_of, picture
from vlm_pg.media.container import open_video
from vlm_pg.media.index import VideoIndex, index_of


def encode(
    path: Path,
    times: Sequence[int],
    codec: str = "libx264",
    first: int = 0,
    clock: int | Fraction = 1000,
    pictures: Sequence[np.ndarray] | None = None,
    pix_fmt: str = "yuv420p",
    rate: int | Fraction = 25,
    **options: str,
) -> Path:
    """``pictures`` (uint8 [height, width, 3 or 4]; else number ``first`` on) at ``times``: ticks of 1 / ``clock`` s."""
    shown = [picture(first + number) for number in range(len(times))] if pictures is None else pictures
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        (stream.height, stream.width), stream.pix_fmt = shown[0].shape[:2], pix_fmt
        stream.time_base = stream.codec_context.time_base = 1 / Fraction(clock)
        for pixels, time in zip(shown, times, strict=True):
            stored = "rgb24" if pixels.shape[2] == 3 else "rgba"
            frame = av.VideoFrame.from_ndarray(pixels, format=stored).reformat(format=pix_fmt)
            frame.pts, frame.time_base = time, 1 / Fraction(clock)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def remux(source: Path, path: Path, change: Callable[[list[Any]], list[Any]], audio_seconds: float = 0.0) -> Path:
    """The packets of a file, changed, in another container; with silence of some seconds beside them."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        sound = new.add_stream("aac", rate=16000) if audio_seconds else None
        for packet in change([packet for packet in old.demux(old.streams.video[0]) if packet.size]):
            packet.stream = stream
            new.mux(packet)
        for offset in range(int(audio_seconds * 16000 / 1024)):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 16000, 1024 * offset
            new.mux(sound.encode(silence))  # type: ignore[union-attr]
        if sound is not None:
            new.mux(sound.encode())
    return path


def at_storage_times(packets: list[Any]) -> list[Any]:
    """Each packet is said to be shown when it is decoded, 25 a second, as in a raw stream that nobody parsed."""
    for offset, packet in enumerate(packets):
        packet.pts = packet.dts = round(Fraction(offset, 25) / packet.time_base)
    return packets


def decoded(path: Path) -> list[int | None]:
    """The numbers of all frames, in the order a decoder gives them: what a player shows."""
    with av.open(str(path)) as container:
        return [number_of(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def with_matrix(source: Path, path: Path, a: float, b: float, c: float, d: float) -> Path:
    """An MP4 or QuickTime file whose track is to be shown at x' = a x + c y, y' = b x + d y."""
    data = bytearray(source.read_bytes())
    offset = data.index(b"tkhd") + 4 + 40  # version 0
    data[offset : offset + 36] = struct.pack(">9i", *(round(n * 65536) for n in (a, b, 0, c, d, 0, 0, 0)), 1 << 30)
    path.write_bytes(data)
    return path


def read_index(path: Path, max_frames: int | None = None) -> VideoIndex:
    """See ``index_of``."""
    with open_video(path) as (container, stream):
        return index_of(container, stream, max_frames)
