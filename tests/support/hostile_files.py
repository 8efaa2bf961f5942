"""Odd and hostile files: bombs, odd metadata, unknown codecs, files that are cut or are something else."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.clip_table import QUICK
from tests.support.clips import Clip, picture, write

BASES = [
    Clip(codec, container, "base", QUICK[codec])
    for codec, container in (
        ("libx264", "mp4"), ("libx264", "matroska"), ("libx264", "mpegts"), ("libx265", "mov"), ("libvpx", "webm"),
        ("libvpx-vp9", "matroska"), ("libsvtav1", "mp4"), ("mpeg4", "avi"), ("mpeg2video", "vob"), ("flv", "flv"),
        ("wmv2", "asf"), ("mpeg4", "mp4"),
    )
]  # fmt: skip


def box(kind: bytes, *parts: bytes) -> bytes:
    """A box of an MP4 file."""
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def base_files(folder: Path) -> dict[str, bytes]:
    """One small healthy video of each container, and images of each format."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for clip in BASES:
        path = write(clip, folder, frames=16)
        files[path.name] = path.read_bytes()
        path.unlink()
    for extension, options in (
        (".png", {}),
        (".jpg", {}),
        (".webp", {"lossless": True}),
        (".jpeg", {"progressive": True}),
    ):
        files[f"picture{extension}"] = image(extension, **options)
    return files


def image(extension: str, **options: object) -> bytes:
    """A small picture in the format of the extension."""
    buffer = io.BytesIO()
    kind = {".png": "PNG", ".webp": "WEBP"}.get(extension, "JPEG")
    Image.fromarray(picture(77)).save(buffer, kind, **options)
    return buffer.getvalue()


def cut_files(bases: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Every base cut at many offsets."""
    for name, data in bases.items():
        stem, _, extension = name.rpartition(".")
        for share in (0, 1, 3, 10, 25, 40, 50, 60, 75, 90, 97, 99):
            yield f"{stem}-cut{share}.{extension}", data[: len(data) * share // 100]


def renamed_files(bases: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Every base under the extensions of the others: content and name disagree."""
    for name, data in bases.items():
        for extension in (".mp4", ".mkv", ".mov", ".webm", ".jpg", ".png", ".webp"):
            if not name.endswith(extension):
                yield f"{name}-as{extension}", data


def bombs(bases: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Small files that ask for much."""
    movie = bases["libx264-mp4-base.mp4"]
    yield from table_bombs(movie)
    deep = b""
    for _ in range(2000):
        deep = box(b"moov", deep)
    yield "deep-boxes.mp4", movie[:32] + deep
    yield "many-boxes.mp4", movie + box(b"free") * 200_000
    yield "cmov.mp4", box(b"ftyp", b"qt  \0\0\0\0") + box(b"moov", box(b"cmov", zlib.compress(b"\0" * 50_000_000)))
    yield "scans.jpg", many_scans(3000)
    yield "scans-as.jpeg", many_scans(40)
    for side in (20_000, 65_000, 2**31 - 1):
        yield f"huge-{side}.png", huge_png(side)
    for side in (9000, 16_383):
        yield f"huge-{side}.webp", huge_webp(side)
    yield "text.png", _png_with(b"zTXt", b"k\0\0" + zlib.compress(b"x" * 60_000_000))
    yield "profile.png", _png_with(b"iCCP", b"k\0\0" + zlib.compress(b"x" * 60_000_000))
    yield "data.png", _png_with(b"IDAT", zlib.compress(b"\0" * 60_000_000))


def table_bombs(movie: bytes) -> Iterator[tuple[str, bytes]]:
    """The MP4 with tables that promise far more samples than it has bytes."""
    for count in (10_000_000, 200_000_000, 0xFFFFFFFF):
        yield f"stts-{count}.mp4", _with_table(movie, b"stts", struct.pack(">IIII", 0, 1, count, 1))
        yield f"ctts-{count}.mp4", _with_table(movie, b"stss", struct.pack(">IIII", 0, 1, count, 1), b"ctts")
        yield f"stsz-{count}.mp4", _with_table(movie, b"stsz", struct.pack(">III", 0, 0, count))
        yield f"stsz-equal-{count}.mp4", _with_table(movie, b"stsz", struct.pack(">III", 0, 1, count))
        many = struct.pack(">II", 0, 1000) + struct.pack(">II", count // 1000, 1) * 1000
        yield f"stts-many-{count}.mp4", _with_table(movie, b"stts", many)
        run = box(
            b"moof", box(b"traf", box(b"tfhd", struct.pack(">II", 0, 1)), box(b"trun", struct.pack(">II", 0, count)))
        )
        yield f"trun-{count}.mp4", movie + run


def _with_table(movie: bytes, old: bytes, content: bytes, new: bytes | None = None) -> bytes:
    """The MP4 with another sample table; the boxes around it grow."""
    offset = movie.index(old) - 4
    size = int.from_bytes(movie[offset : offset + 4], "big")
    table = box(new or old, content)
    grown = bytearray(movie[:offset] + table + movie[offset + size :])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = movie.index(kind) - 4
        grown[at : at + 4] = struct.pack(">I", int.from_bytes(movie[at : at + 4], "big") + len(table) - size)
    return bytes(grown)


def many_scans(scans: int, side: int = 2000) -> bytes:
    """A progressive JPEG that refines one coefficient over and over."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    return data[:second] + data[first:second] * scans + data[second:]


def _png_with(kind: bytes, content: bytes) -> bytes:
    data = image(".png")
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + chunk + data[33:]


def huge_png(side: int) -> bytes:
    """A PNG of a few bytes whose header states ``side`` squared pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def huge_webp(side: int) -> bytes:
    """A WebP whose canvas is ``side`` squared while its picture is small."""
    small = image(".webp", lossless=True)[12:]
    extended = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (side - 1).to_bytes(3, "little") * 2
    body = b"WEBP" + extended + small
    return b"RIFF" + struct.pack("<I", len(body)) + body


def odd_metadata(bases: dict[str, bytes], folder: Path) -> Iterator[tuple[str, bytes]]:
    """Harmless files with what collections hold: titles in other encodings, EXIF of odd types, unknown codecs."""
    for base, container in (
        ("mp4", "mp4"),
        ("mkv", "matroska"),
        ("avi.mkv", "avi"),
        ("mov", "mov"),
        ("flv.mkv", "flv"),
    ):
        yield f"title-{base.replace('.', '-')}.{base.rpartition('.')[2]}", titled(folder, container)
    movie = bases["libx264-mp4-base.mp4"]
    for code in (b"encv", b"zzzz", b"drmi", b"\0\0\0\0"):
        yield f"codec-{code.hex()}.mp4", movie.replace(b"avc1", code)
    webm = bases["libvpx-webm-base.webm"]
    yield "codec.webm", webm.replace(b"V_VP8", b"V_XX8")
    for number, exif in enumerate(odd_exifs()):
        yield f"exif-{number}.jpg", image(".jpg", exif=exif)
        yield f"exif-{number}.png", image(".png", exif=exif)
    for name, data in (("empty", b""), ("zeros", bytes(50_000)), ("text", b"hello\n" * 1000), ("ff", b"\xff" * 50_000)):
        for extension in (".mp4", ".mkv", ".webm", ".jpg", ".png", ".webp"):
            yield f"{name}{extension}", data


def titled(folder: Path, container: str) -> bytes:
    """A video whose title is Latin-1, not UTF-8."""
    import av

    path = folder / f"titled.{container}"
    with av.open(str(path), "w", format=container) as output:
        output.metadata["title"] = "TITLE-HERE"
        stream = output.add_stream("mpeg4" if container != "flv" else "flv", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(8):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        output.mux(stream.encode())
    data = path.read_bytes()
    path.unlink()
    assert b"TITLE-HERE" in data
    return data.replace(b"TITLE-HERE", b"caf\xe9 \xff\xfe\x80 x")


def odd_exifs() -> Iterator[bytes]:
    """EXIF blocks with an orientation (6: a quarter turn) beside a tag of another type than its standard one."""
    types = {
        1: b"\1\0\0\0",
        2: b"abc\0",
        3: b"\1\0\0\0",
        4: b"\1\0\0\0",
        7: b"abcd",
        9: b"\xff\xff\xff\xff",
        200: b"abcd",
    }
    for tag in (0x0100, 0x010E, 0x0132, 0x8769, 0x9286, 0xA005, 0xC4A5):
        for kind, value in types.items():
            entries = sorted([(0x0112, 3, 1, b"\6\0\0\0"), (tag, kind, 4 if kind in (1, 2, 7, 200) else 1, value)])
            body = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries)
            yield b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + body + b"\0\0\0\0"


def growing(folder: Path, side: int) -> bytes:
    """A Matroska video whose header and first frame are small and whose other frames are ``side`` squared."""
    import av

    path = folder / "growing.mkv"
    with av.open(str(path), "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        output.start_encoding()
        for number in range(6):
            buffer = io.BytesIO()
            size = (96, 64) if number == 0 else (side, side)
            Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8)).save(buffer, "JPEG")
            packet = av.Packet(buffer.getvalue())
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, number, number, True
            packet.time_base = stream.codec_context.time_base
            output.mux(packet)
    return path.read_bytes()


def late_stream(folder: Path) -> bytes:
    """MPEG-TS in whose second half a stream of sound begins that its first table does not name."""
    import av

    parts = []
    for with_sound in (False, True):
        path = folder / "part.ts"
        with av.open(str(path), "w", format="mpegts", container_options={"mpegts_flags": "resend_headers"}) as output:
            stream = output.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            sound = output.add_stream("mp2", rate=48_000, layout="mono") if with_sound else None
            for number in range(100):
                frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
                frame.pts = number + (100 if with_sound else 0)
                output.mux(stream.encode(frame))
                if sound is not None and number % 2 == 0:
                    samples = av.AudioFrame.from_ndarray(np.zeros((1, 1152), np.int16), format="s16", layout="mono")
                    samples.sample_rate, samples.pts = 48_000, 48_000 * 4 + number // 2 * 1152
                    output.mux(sound.encode(samples))
            output.mux(stream.encode())
        parts.append(path.read_bytes())
    return b"".join(parts)
