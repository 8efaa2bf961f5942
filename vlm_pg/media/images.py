"""Reading one still image, as Qwen's own reader does, with the orientation and size checks it lacks.

Headers are read before Pillow gives memory or time to a file: it makes room for a whole WebP when it opens one, and
goes through a JPEG once for every scan. Sources: RFC 9649 (WebP), ITU-T T.81 B.1.1 (JPEG).
"""

from __future__ import annotations

import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import open_regular
from vlm_pg.media.sampling import resized_size
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.worker import call_in_parent
from vlm_pg.types import DecodedMedia

FORMATS = ("JPEG", "PNG", "WEBP")
# Pillow's errors for damaged files of these formats (a broken PNG chunk is a SyntaxError)
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
_ORIENTATION = 0x0112
# Four channels of 16 bits, not compressed; and metadata of a file.
_BYTES_PER_PIXEL, _FURTHER_BYTES = 8, 64 << 20
# how a picture stored with each orientation (EXIF 2.32, 4.6.4) is put upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(path: Path, settings: MediaSettings, factor: int, name: str = "") -> DecodedMedia:
    """The image, upright, on white where it is transparent, resized for the vision tower (multiples of ``factor``).

    Raises:
        SampleError: ``image_too_large`` (by its header), ``animated_image``, ``corrupt_media``, ``bad_aspect_ratio``,
            ``too_narrow``.
    """
    name = name or path.name
    with opened_image(path, name, settings) as file:
        # the size is judged before the pixels are decoded; orientation may swap the sides, never the verdict
        upright = read_upright(file, name, settings, lambda image: _new_size(image, settings, factor))
    height, width = _new_size(upright, settings, factor)
    resized = upright.resize((width, height), Image.Resampling.BICUBIC)
    frames = np.ascontiguousarray(np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1))[None]
    return DecodedMedia("image", frames, (0.0,), 0.0, "pillow")


@contextmanager
def opened_image(path: Path, name: str, settings: MediaSettings, folder: int | None = None) -> Iterator[BinaryIO]:
    """A file for reading an image; in an open ``folder`` (a descriptor) no link is followed.

    Raises:
        SampleError: ``image_too_large`` by its bytes; ``corrupt_media`` for what its reading raises.
    """
    try:
        with open_regular(path, folder) as file, reading(_DAMAGED):
            check_file_size(os.fstat(file.fileno()).st_size, name, settings)
            yield file
    except DecodeFailure as error:
        raise SampleError(
            "corrupt_media",
            f"image '{name}' cannot be decoded: {error}. A complete {', '.join(FORMATS)} file is needed. Fetch or "
            "convert the file again, or remove the sample.",
            error.trace,
        ) from error


def most_file_bytes(settings: MediaSettings) -> int:
    """More bytes than a file of any image within the limits has."""
    return _BYTES_PER_PIXEL * settings.max_header_pixels + _FURTHER_BYTES


def check_file_size(size: int, name: str, settings: MediaSettings) -> None:
    """Refuse a file of more bytes than any image within the limits. Raises SampleError ``image_too_large``."""
    most = most_file_bytes(settings)
    if size > most:
        raise SampleError(
            "image_too_large",
            f"image '{name}' is a file of {size} bytes. No image of up to {settings.max_header_pixels} pixels needs "
            f"more than {most}. Convert the file, or raise media.max_header_pixels.",
        )


def read_upright(
    file: BinaryIO, name: str, settings: MediaSettings, judge: Callable[[Image.Image], object]
) -> Image.Image:
    """The picture of an open file, RGB, upright, on white.

    ``judge`` may refuse it by its header, before its pixels are decoded.

    Raises:
        DecodeFailure, or what ``opened_image`` makes one: it is damaged.
        SampleError: ``image_too_large``, ``animated_image``, or of ``judge``.
    """
    file.seek(0)
    if jpeg_scans(file, MAX_SCANS) > MAX_SCANS:  # Pillow would go through it again and again
        raise DecodeFailure(f"it has more than {MAX_SCANS} scans, which no encoder writes")
    with _opened(file, name, settings) as image:
        # Of an animation one frame would be shown. Further pictures in a JPEG (MPO) are no animation.
        count = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
        if count > 1:
            raise SampleError(
                "animated_image",
                f"image '{name}' is an animation of {count} frames. Still images are expected, and files of a video "
                "format for what moves. Convert it to mp4 or webm and name that as a video, or save the frame that is "
                "meant.",
            )
        judge(image)
        image.load()
        # Only the orientation is taken from the EXIF data: other tags may be of any type and are not used.
        orientation: Any = image.getexif().get(_ORIENTATION)
        turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
        return on_white(image if turn is None else image.transpose(turn))


def stored_size(file: BinaryIO, name: str, settings: MediaSettings) -> tuple[int, int]:
    """Width and height as stored, by the header alone. Raises as ``read_upright``."""
    with _opened(file, name, settings) as image:
        return image.size


def _opened(file: BinaryIO, name: str, settings: MediaSettings) -> Image.Image:
    """Its header read. Pillow makes room for a whole WebP already here."""
    size = webp_size(file)
    if size is not None and size[0] * size[1] > settings.max_header_pixels:
        raise _too_large(name, f"{size[0]}x{size[1]} pixels", settings)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked below
            image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_large(name, "more pixels than Pillow opens", settings) from error
    except UnidentifiedImageError as error:  # it names the open file by a number, another one in each process
        raise DecodeFailure("its content is no image that Pillow knows") from error
    if image.width * image.height > settings.max_header_pixels:
        raise _too_large(name, f"{image.width}x{image.height} pixels", settings)
    return image


def _new_size(image: Image.Image, settings: MediaSettings, factor: int) -> tuple[int, int]:
    """Height and width to resize to."""
    bounds = settings.image_min_pixels, settings.image_max_pixels
    return call_in_parent(resized_size, image.height, image.width, *bounds, factor)


def on_white(image: Image.Image) -> Image.Image:
    """RGB, transparent parts white; 16-bit grey is scaled to 8 bits (Pillow's own conversion would clip it)."""
    if image.mode.startswith("I"):
        wide = np.array(image, dtype=np.uint32)
        wide >>= 8
        image = Image.fromarray(np.minimum(wide, 255, out=wide).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _too_large(name: str, size: str, settings: MediaSettings) -> SampleError:
    return SampleError(
        "image_too_large",
        f"image '{name}' has {size} according to its header. At most {settings.max_header_pixels} pixels are "
        "allowed. Scale the file down, or raise media.max_header_pixels.",
    )


# The usual progressive JPEG has 10 scans.
MAX_SCANS = 32
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_NO_LENGTH = {0xD8, 0x01}


def webp_size(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height of the canvas; None for what is no WebP."""
    file.seek(0)
    head = file.read(30)
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return None
    kind, data = head[12:16], head[20:]
    if kind == b"VP8X":
        return int.from_bytes(data[4:7], "little") + 1, int.from_bytes(data[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[6:10])
    return width & 0x3FFF, height & 0x3FFF


def jpeg_scans(file: BinaryIO, most: int) -> int:
    """How many scans a JPEG has, counted up to ``most`` + 1; 0 for what is no JPEG."""
    if file.read(2) != b"\xff\xd8":
        return 0
    data, scans, offset = file.read(), 0, 0
    while scans <= most:
        marker = _MARKER.search(data, offset)
        if marker is None:
            break
        code, offset = data[marker.start() + 1], marker.end()
        if code == _END_OF_IMAGE:
            break
        if code not in _NO_LENGTH:
            offset += int.from_bytes(data[offset : offset + 2], "big")
        scans += code == _START_OF_SCAN
    return scans
