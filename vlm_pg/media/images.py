"""Reading one still image, as Qwen's own reader does, with the orientation and size checks it lacks."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vlm_pg.errors import SampleError
from vlm_pg.media.sampling import resized_size
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia

FORMATS = ("JPEG", "PNG", "WEBP")
# everything Pillow raises for damaged files of these formats (a broken PNG chunk is a SyntaxError)
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)


def decode_image(path: Path, settings: MediaSettings, factor: int) -> DecodedMedia:
    """The image, upright, on white where it is transparent, resized for the vision tower.

    Raises:
        SampleError: ``image_too_large`` (by its header), ``corrupt_media``, ``bad_aspect_ratio``, ``too_narrow``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked below
            image = Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_large(path, "more pixels than Pillow opens", settings) from error
    except DAMAGED as error:
        raise _damaged(path, error) from error
    with image:
        if image.width * image.height > settings.max_header_pixels:
            raise _too_large(path, f"{image.width}x{image.height} pixels", settings)
        # the size is judged before the pixels are decoded; orientation may swap the sides, never the verdict
        resized_size(image.height, image.width, settings.image_min_pixels, settings.image_max_pixels, factor)
        try:
            upright = _on_white(ImageOps.exif_transpose(image))
        except DAMAGED as error:
            raise _damaged(path, error) from error
    height, width = resized_size(
        upright.height, upright.width, settings.image_min_pixels, settings.image_max_pixels, factor
    )
    resized = upright.resize((width, height), Image.Resampling.BICUBIC)
    frames = np.ascontiguousarray(np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1))[None]
    return DecodedMedia("image", frames, (0.0,), 0.0, "pillow")


def _on_white(image: Image.Image) -> Image.Image:
    """RGB, transparent parts white; 16-bit grey is scaled to 8 bits (Pillow's own conversion would clip it)."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, dtype=np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _too_large(path: Path, size: str, settings: MediaSettings) -> SampleError:
    return SampleError(
        "image_too_large",
        f"image '{path.name}' has {size} according to its header. At most {settings.max_header_pixels} pixels are "
        "allowed. Scale the file down, or raise media.max_header_pixels.",
    )


def _damaged(path: Path, error: Exception) -> SampleError:
    return SampleError(
        "corrupt_media",
        f"image '{path.name}' cannot be decoded: {error}. A complete {', '.join(FORMATS)} file is needed. Fetch or "
        "convert the file again, or remove the sample.",
    )
