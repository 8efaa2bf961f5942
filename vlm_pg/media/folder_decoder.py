"""Reading chosen frames of a folder of pictures, each judged as any image is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.frame_folder import FrameFolder, check_one_size, list_frames
from vlm_pg.media.images import DAMAGED, check_file_size, damaged, read_upright, stored_size
from vlm_pg.media.limits import check_frame_size, check_length
from vlm_pg.media.selection import Timeline
from vlm_pg.media.settings import MediaSettings


def survey_folder(path: Path, name: str, settings: MediaSettings, fps: float) -> tuple[FrameFolder, Timeline]:
    """The frames of a folder and when they are shown. The header of every picture is read, none is decoded.

    Args:
        path, name: of the folder.
        settings: limits.
        fps: pictures a second.

    Raises:
        SampleError: as ``list_frames``; ``video_too_long``, ``video_too_large``, or what is wrong with a picture.
    """
    folder = list_frames(path, name, fps, settings.max_video_frames)
    end = len(folder.names) / fps
    check_length(name, end, settings)
    sizes: dict[int, tuple[int, int]] = {}
    with folder.opened() as descriptor:
        for place in range(len(folder.names)):
            sizes[place] = _size(folder, descriptor, place, settings)
            if place == 0:
                check_frame_size(name, *sizes[0], settings)
    check_one_size(folder, sizes)
    seconds = [place / fps for place in range(len(folder.names))]
    return folder, Timeline.of(seconds, 1 / Fraction(fps), fps, shown_until=end, clock=(0.0, end))


def _size(folder: FrameFolder, descriptor: int, place: int, settings: MediaSettings) -> tuple[int, int]:
    """Width and height as stored."""
    name = folder.frame_name(place)
    try:
        with folder.open_frame(descriptor, place) as file, reading("open", DAMAGED):
            check_file_size(os.fstat(file.fileno()).st_size, name, settings)
            return stored_size(file, name, settings)
    except DecodeFailure as error:
        raise damaged(name, error) from error


class FolderDecoder:
    """Pictures of a folder as the frames of a video (``Decoder``); Pillow reads them, whatever media.decoder is.

    Args:
        folder: its frames.
        settings: limits of images.
    """

    name = "pillow"

    def __init__(self, folder: FrameFolder, settings: MediaSettings):
        self._folder, self._settings = folder, settings
        self._first: tuple[int, tuple[int, int]] | None = None

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """See ``Decoder.read``.

        Raises:
            SampleError: what is wrong with a picture; ``bad_frame_folder``: they are turned to several sizes.
        """
        with self._folder.opened() as descriptor:
            pictures = {place: self._picture(descriptor, place) for place in dict.fromkeys(indices)}
        sizes = {place: (picture.shape[1], picture.shape[0]) for place, picture in pictures.items()}
        check_one_size(self._folder, dict([self._first] if self._first else []) | sizes)
        self._first = self._first or next(iter(sizes.items()))
        return np.stack([pictures[place] for place in indices])

    def _picture(self, descriptor: int, place: int) -> np.ndarray:
        """uint8 [height, width, 3], upright, on white."""
        name = self._folder.frame_name(place)
        try:
            with self._folder.open_frame(descriptor, place) as file, reading("decode", DAMAGED):
                check_file_size(os.fstat(file.fileno()).st_size, name, self._settings)
                return np.asarray(read_upright(file, name, self._settings, self._judge))
        except DecodeFailure as error:
            raise damaged(name, error) from error

    def _judge(self, picture: Image.Image) -> None:
        """Once more: the file may be another one since its header was read."""
        check_frame_size(self._folder.name, picture.width, picture.height, self._settings)

    def close(self) -> None:
        """Nothing stays open between reads."""
