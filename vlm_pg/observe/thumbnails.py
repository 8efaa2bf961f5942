"""Picture strips: a question's frames side by side, each with its time in seconds."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING

from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.types import Prompt

if TYPE_CHECKING:
    from PIL import Image

_FRAME_HEIGHT = 112
_MAX_FRAME_WIDTH = 224
_FOOTER_HEIGHT = 18
_GAP = 3
_INK, _PAPER = (235, 235, 235), (28, 30, 34)


def save_strip(folder: RunFolder, sample_id: str, prompt: Prompt, max_frames: int) -> str | None:
    """Save the strip of a prompt's preview once and return its path relative to the run's folder.

    The file is named by the sample and its pixels, so a sample seen again reuses its file. None without a preview
    (a text-only question) or with ``max_frames`` 0.
    """
    if not prompt.preview or max_frames == 0:
        return None
    name = hashlib.sha256(f"{sample_id}\n{prompt.content_key}".encode("utf-8", "surrogatepass")).hexdigest()[:20]
    path = folder.thumbnails / f"{name}.jpg"
    if not path.exists():
        folder.thumbnails.mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        draw_strip(prompt, max_frames).save(picture, "JPEG", quality=82)
        write_bytes_atomic(path, picture.getvalue())
    return path.relative_to(folder.path).as_posix()


def draw_strip(prompt: Prompt, max_frames: int) -> Image.Image:
    """The strip of at most ``max_frames`` frames, evenly chosen from the preview, first and last included."""
    from PIL import Image, ImageDraw, ImageFont

    frames = [_at_strip_height(Image.fromarray(prompt.preview[index])) for index in shown_frames(prompt, max_frames)]
    seconds = [prompt.preview_seconds[index] for index in shown_frames(prompt, max_frames)]
    width = sum(frame.width for frame in frames) + _GAP * (len(frames) - 1)
    strip = Image.new("RGB", (width, _FRAME_HEIGHT + _FOOTER_HEIGHT), _PAPER)
    pen = ImageDraw.Draw(strip)
    font = ImageFont.load_default(size=11)
    left = 0
    for frame, second in zip(frames, seconds, strict=True):
        strip.paste(frame, (left, (_FRAME_HEIGHT - frame.height) // 2))
        if any(seconds):  # a single image has the one time 0.0, which says nothing
            middle = (left + frame.width / 2, _FRAME_HEIGHT + _FOOTER_HEIGHT / 2)
            pen.text(middle, f"{second:.2f} s", fill=_INK, font=font, anchor="mm")
        left += frame.width + _GAP
    return strip


def shown_frames(prompt: Prompt, max_frames: int) -> list[int]:
    """Indices of the preview's frames that a strip shows: ``[0, 3, 7]`` for 3 of 8."""
    available = len(prompt.preview)
    count = min(available, max_frames)
    if count <= 1:
        return [0][:count]
    return [round(index * (available - 1) / (count - 1)) for index in range(count)]


def _at_strip_height(frame: Image.Image) -> Image.Image:
    """Scaled to the strip's height, or to its widest width when the frame is very wide."""
    from PIL import Image

    scale = min(_FRAME_HEIGHT / frame.height, _MAX_FRAME_WIDTH / frame.width)
    size = (max(1, round(frame.width * scale)), max(1, round(frame.height * scale)))
    # Small synthetic clips are enlarged without blur, so that their pixels stay visible.
    return frame.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
