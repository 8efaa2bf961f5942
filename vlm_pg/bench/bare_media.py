"""The least that a medium's frames cost: decoded and resized, where they lie in the file known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vlm_pg.media.container import header_of, open_video
from vlm_pg.media.decode_file import resize_frames
from vlm_pg.media.frame_folder import FolderDecoder, list_frames
from vlm_pg.media.index import index_of
from vlm_pg.media.selection import WHOLE, Part, Timeline
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.video_decoders import PyAVDecoder
from vlm_pg.types import DecodedMedia, MediaKind


def bare_decoding(
    kind: MediaKind, path: str, settings: MediaSettings, media: DecodedMedia, part: Part = WHOLE
) -> Callable[[], None]:
    """What decodes and resizes the frames of ``media`` once more, by PyAV or Pillow, without any other look at it."""
    height, width = media.frames.shape[2:]
    if kind == "image":
        return lambda: _image(path, height, width)
    if part.folder_fps is not None:
        return _folder(path, settings, media, part.folder_fps)
    with open_video(Path(path)) as (container, stream):
        header, index = header_of(container, stream), index_of(container, stream, settings.max_video_frames)
    seconds = np.asarray(Timeline.of(index.pts_seconds, index.time_base, header.stated_fps).seconds)
    places = sorted({int(np.abs(seconds - second).argmin()) for second in media.frame_seconds})

    def video() -> None:
        decoder = PyAVDecoder(Path(path), index, settings.max_video_frame_pixels)
        try:
            resize_frames(decoder.read(places), height, width)
        finally:
            decoder.close()

    return video


def _folder(path: str, settings: MediaSettings, media: DecodedMedia, fps: float) -> Callable[[], None]:
    folder = list_frames(Path(path), Path(path).name, fps, settings.max_video_frames)
    places = sorted({round(second * fps) for second in media.frame_seconds})
    height, width = media.frames.shape[2:]

    def pictures() -> None:
        resize_frames(FolderDecoder(folder, settings).read(places), height, width)

    return pictures


def _image(path: str, height: int, width: int) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
