"""The chat messages of an lmms-eval task as our prompts take them: media by reference, texts in their places."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_pg.errors import VlmPgError
from vlm_pg.types import MediaRef


@dataclass(frozen=True)
class Conversation:
    """``messages``: as chat templates take them; ``media``: of their parts that are no texts, in order."""

    messages: tuple[dict[str, Any], ...]
    media: tuple[MediaRef, ...]


def conversation_of(messages: Sequence[Mapping[str, Any]], pictures: Path, name: str) -> Conversation:
    """Read a task's messages: {"role": ..., "content": [{"type": "image", "url": PIL image or path}, ...]}.

    Args:
        pictures: a folder for pictures that come in memory; equal ones get one file.
        name: of the question, for messages.

    Raises:
        VlmPgError: a part that is no text, image or video file.
    """
    media: list[MediaRef] = []
    result = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        kept: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] == "text":
                kept.append({"type": "text", "text": part["text"]})
            else:
                media.append(_medium(part, pictures, name))
                kept.append({"type": part["type"]})
        result.append({"role": message["role"], "content": kept})
    return Conversation(tuple(result), tuple(media))


def _medium(part: Mapping[str, Any], pictures: Path, name: str) -> MediaRef:
    kind, value = part["type"], part.get("url")
    if kind == "image" and isinstance(value, Image.Image):
        return MediaRef("image", _saved(value, pictures))
    start, end = part.get("start_time"), part.get("end_time")
    if kind == "video" and isinstance(value, Mapping):
        start, end = value.get("video_start", start), value.get("video_end", end)
        value = value.get("url") or value.get("path")
    if isinstance(value, str) and kind == "image":
        return MediaRef("image", _absolute(value))
    if isinstance(value, str) and kind == "video":
        return MediaRef("video", _absolute(value), start, end)
    raise VlmPgError(
        f"{name} shows a part of type {kind!r} that is a {type(value).__name__}. Images (in memory or as files) and "
        "videos (as files) can be shown. Choose a task with those."
    )


def _absolute(path: str) -> str:
    """Of a file; URLs stay, and are refused where media are read."""
    return path if "://" in path else str(Path(path).absolute())


def _saved(picture: Image.Image, folder: Path) -> str:
    """The picture's pixels as a file. What else it carries (a turn to be made) is not applied by lmms-eval either."""
    has_alpha = "A" in picture.getbands() or "transparency" in picture.info
    plain = picture.convert("RGBA" if has_alpha else "RGB")
    plain.info = {}
    target = io.BytesIO()
    plain.save(target, "PNG", compress_level=1)
    data = target.getvalue()
    path = folder / f"{hashlib.sha256(data).hexdigest()}.png"
    if not path.exists():
        path.write_bytes(data)
    return str(path)
