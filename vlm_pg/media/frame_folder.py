"""A video that is a folder of numbered pictures: which of its files are frames, in which order, and reading them.

    frames/castle_s07e05/00001.jpg, 00002.jpg, 00003.jpg, ...

The numbers decide alone, and whatever would make the order or the times a guess is refused: a number that is missing or
there twice, pictures of two series, links, files that lie among the numbers and are no pictures. Files of other names
(``n_frames``, ``audio.wav``), folders, and names that begin with a dot are ignored. Pictures are judged as images.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from vlm_pg.errors import SampleError, printable
from vlm_pg.media.container import open_regular
from vlm_pg.media.images import opened_image, read_upright, stored_size
from vlm_pg.media.paths import EXTENSIONS
from vlm_pg.media.sampling import Timeline, check_frame_size, check_length
from vlm_pg.media.settings import MediaSettings

_SUFFIXES = EXTENSIONS["image"]
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_FIRST_NUMBERS = (0, 1)
_SHOWN = 5


@dataclass(frozen=True)
class FrameFolder:
    """The frames of a folder: frame k, counted from 0, is shown from k / ``fps`` seconds on.

    ``names``: of the pictures, in the order of their numbers. ``name``: of the folder, in messages.
    """

    path: Path
    names: tuple[str, ...]
    fps: float
    name: str

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the folder, for opening its pictures: what is renamed meanwhile leads nowhere else."""
        descriptor = open_folder(self.path, self.name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def frame_name(self, index: int) -> str:
        """A picture's name in messages."""
        return f"{self.name}/{printable(self.names[index], 100)}"


def list_frames(path: Path, name: str, fps: float, most: int) -> FrameFolder:
    """The frames of a folder, by the names of its files alone. ``most``: so many files may lie in it.

    Raises:
        SampleError: ``bad_frame_folder``, or ``video_too_long`` with more files.
    """
    pictures, others = _listed(path, name, most)
    if not pictures:
        raise _fault(name, "holds no numbered picture")
    found: list[tuple[int, str, str]] = []
    for file in pictures:
        match = _NUMBERED.fullmatch(Path(file).stem)
        if match is None:
            raise _fault(name, f"holds a picture without a number, '{printable(file, 100)}'")
        found.append((int(match[2]), match[1], file))
    numbered = [(number, file) for number, _, file in sorted(found)]
    prefixes = sorted({prefix for _, prefix, _ in found})
    if len(prefixes) > 1:
        shown = " and ".join(f"'{printable(prefix, 40)}...'" for prefix in prefixes[:2])
        raise _fault(name, f"holds pictures of {len(prefixes)} series ({shown})")
    _check_numbers(name, numbered)
    for other in others:
        if re.match(re.escape(prefixes[0]) + "[0-9]", other):
            raise _fault(name, f"holds '{printable(other, 100)}' among its pictures, which is none by its name")
    return FrameFolder(path, tuple(file for _, file in numbered), fps, name)


def open_folder(path: Path, name: str) -> int:
    """A descriptor of a folder. Raises SampleError ``bad_frame_folder`` where there is none that may be read."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _fault(name, f"cannot be read: {error.strerror}") from error


def folder_state(path: Path) -> str:
    """Names, sizes and times of change of all files in a folder, as a hash; "-" of what is no folder."""
    total = 0  # of all files' hashes: it does not depend on their order, and takes no memory
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                state = entry.stat(follow_symlinks=False)
                numbers = (state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
                total += int.from_bytes(hashlib.sha256(f"{entry.name!r} {numbers}".encode()).digest())
    except OSError:
        return "-"
    return f"{total:x}"


def content_of_frames(folder: FrameFolder, most_bytes: int) -> str:
    """SHA-256 over the hashes of all pictures in their order, whatever they are called and however fast they are shown.

    Raises:
        DecodeFailure, SampleError: one cannot be opened, or (``bad_frame_folder``) has more than ``most_bytes``.
    """
    found = hashlib.sha256()
    with folder.opened() as descriptor:
        for index in range(len(folder.names)):
            with open_regular(Path(folder.names[index]), descriptor) as file:
                if os.fstat(file.fileno()).st_size > most_bytes:
                    raise _fault(folder.name, f"holds '{folder.names[index]}' of more than {most_bytes} bytes")
                found.update(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
    return found.hexdigest()


def check_one_size(folder: FrameFolder, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Refuse pictures of several sizes: which one the video has would be a guess. ``sizes``: width, height by index.

    Raises:
        SampleError: ``bad_frame_folder``.
    """
    first, size = next(iter(sizes.items()))
    for index, other in sizes.items():
        if other != size:
            shown = (
                f"'{folder.names[first]}' has {size[0]}x{size[1]} pixels, '{folder.names[index]}' {other[0]}x{other[1]}"
            )
            raise _fault(folder.name, f"holds pictures of several sizes: {shown}")


def _listed(path: Path, name: str, most: int) -> tuple[list[str], list[str]]:
    """Pictures by their names, and other files."""
    pictures, others = [], []
    descriptor = open_folder(path, name)
    try:
        with os.scandir(descriptor) as entries:
            for count, entry in enumerate(entries):
                if count == most:
                    raise SampleError(
                        "video_too_long",
                        f"video '{name}' is a folder of more than {most} files, the most that are allowed. Cut it, or "
                        "raise media.max_video_frames.",
                    )
                if entry.name.startswith("."):
                    continue
                if Path(entry.name).suffix.lower() not in _SUFFIXES:
                    others += [] if entry.is_dir(follow_symlinks=False) else [entry.name]
                    continue
                if not entry.is_file(follow_symlinks=False):
                    what = "is a link" if entry.is_symlink() else "is no regular file"
                    raise _fault(name, f"holds '{printable(entry.name, 100)}', which {what}")
                pictures.append(entry.name)
    except OSError as error:
        raise _fault(name, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return pictures, others


def _check_numbers(name: str, numbered: Sequence[tuple[int, str]]) -> None:
    for (number, file), (following, other) in pairwise(numbered):
        if number == following:
            raise _fault(name, f"holds two pictures of number {number}, '{file}' and '{other}'")
    numbers = [number for number, _ in numbered]
    if numbers[0] not in _FIRST_NUMBERS:
        raise _fault(name, f"begins with number {numbers[0]}, as '{numbered[0][1]}' has it, and not with 0 or 1")
    gaps = [(before + 1, after - 1) for before, after in pairwise(numbers) if after > before + 1]
    if gaps:
        shown = ", ".join(str(one) if one == last else f"{one} to {last}" for one, last in gaps[:_SHOWN])
        more = f" and others, {len(gaps)} gaps in all" if len(gaps) > _SHOWN else ""
        raise _fault(name, f"lacks the pictures of number {shown}{more}, between {numbers[0]} and {numbers[-1]}")


def _fault(name: str, what: str) -> SampleError:
    return SampleError(
        "bad_frame_folder",
        f"video '{name}' is a folder that {what}. Pictures ({', '.join(_SUFFIXES)}) of one series and one size are "
        "expected, numbered without gaps from 0 or 1 on (00001.jpg, 00002.jpg, ...). Complete the folder or move what "
        "does not belong to it away, or remove the record.",
    )


def survey_folder(path: Path, name: str, settings: MediaSettings, fps: float) -> tuple[FrameFolder, Timeline]:
    """The frames of a folder and when they are shown. The header of every picture is read, none is decoded.

    Raises:
        SampleError: as ``list_frames``; ``video_too_long``, ``video_too_large``, or what is wrong with a picture.
    """
    folder = list_frames(path, name, fps, settings.max_video_frames)
    end = len(folder.names) / fps
    check_length(name, end, settings)
    sizes: dict[int, tuple[int, int]] = {}
    with folder.opened() as descriptor:
        for index in range(len(folder.names)):
            picture = folder.frame_name(index)
            with opened_image(Path(folder.names[index]), picture, settings, descriptor) as file:
                sizes[index] = stored_size(file, picture, settings)
            if index == 0:
                check_frame_size(name, *sizes[0], settings)
    check_one_size(folder, sizes)
    seconds = [index / fps for index in range(len(folder.names))]
    return folder, Timeline.of(seconds, 1 / Fraction(fps), fps, shown_until=end, clock=(0.0, end))


class FolderDecoder:
    """Pictures of a folder as the frames of a video (``Decoder``); Pillow reads them, whatever media.decoder is."""

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
            pictures = {index: self._picture(descriptor, index) for index in dict.fromkeys(indices)}
        sizes = {index: (picture.shape[1], picture.shape[0]) for index, picture in pictures.items()}
        check_one_size(self._folder, dict([self._first] if self._first else []) | sizes)
        self._first = self._first or next(iter(sizes.items()))
        return np.stack([pictures[index] for index in indices])

    def _picture(self, descriptor: int, index: int) -> np.ndarray:
        """uint8 [height, width, 3], upright, on white."""
        name = self._folder.frame_name(index)

        def check_size(picture: Image.Image) -> None:  # once more: the file may have been replaced
            check_frame_size(self._folder.name, picture.width, picture.height, self._settings)

        with opened_image(Path(self._folder.names[index]), name, self._settings, descriptor) as file:
            return np.asarray(read_upright(file, name, self._settings, check_size))
