"""Decoded media on disk: sampled and resized frames, decoded once, under a key of all that decides them.

The key is of the file's content, the part of it that is shown, the settings that decide about frames, and the decoders,
machine and source of this package (``made_with``). So the same frames come back bit for bit, whatever a file is called
and whichever process reads it, and no entry has to be invalidated when a file or a setting changes.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vlm_pg.cache.eviction import Outcome
from vlm_pg.cache.provenance import gpu_driver, gpu_models, source_digest
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import Damaged, Entry, Store, key_of
from vlm_pg.errors import SampleError
from vlm_pg.media import video_decoders
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import judge, open_regular
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.frame_folder import content_of_frames, folder_state, list_frames
from vlm_pg.media.images import check_file_size, most_file_bytes
from vlm_pg.media.sampling import MAX_ASPECT_RATIO, WHOLE, Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import Cue, DecodedMedia, MediaKind
from vlm_pg.versions import version_of

KIND, FEATURES = "frames", "features"
# They decide how frames are made, not which and how: everything else is part of the key, limits that refuse a file too.
_NOT_OF_THE_FRAMES = frozenset(
    ("workers", "deadline_seconds", "worker_memory_bytes", "remote_timeout_seconds", "remote_private_hosts")
)


def load_file(*arguments: Any, **named: Any) -> DecodedMedia:
    """The medium of ``cached_file``."""
    return cached_file(*arguments, **named)[0]


def store_file(*arguments: Any) -> bool:
    """Whether the frames of ``cached_file`` are in the cache now."""
    return cached_file(*arguments)[1]


def cached_file(
    kind: MediaKind,
    path: str,
    settings: MediaSettings,
    factor: int,
    part: Part = WHOLE,
    subtitles: str = "",
    cache_settings: CacheSettings | None = None,
    since: float | None = None,
) -> tuple[DecodedMedia, bool]:
    """As ``decode_file``, with frames from the cache, or else stored there; and whether they are in it now.

    The content of a URL may change, so it is decoded every time; and so are files that cannot be used. ``since`` is
    that of ``Store``.

    Raises:
        SampleError: as ``decode_file``.
        ConfigError: the cache cannot be used.
    """
    is_local = "://" not in path and "://" not in subtitles
    if cache_settings is None or cache_settings.folder is None or not (cache_settings.frames and is_local):
        return decode_file(kind, path, settings, factor, part, subtitles), False
    store = _store(cache_settings.folder, cache_settings.max_bytes, since)
    before = _states(path, subtitles, part)
    contents = _contents(kind, before, settings)
    if contents is None:  # decoding it raises the reason
        return decode_file(kind, path, settings, factor, part, subtitles), False
    parts = {"kind": kind, "content": contents, "part": asdict(part), "factor": factor}
    by = made_with(kind if part.folder_fps is None else "folder", settings.decoder, settings.decoder_device)
    of_frames = settings.model_dump(mode="json", exclude=set(_NOT_OF_THE_FRAMES))
    key = key_of({**parts, "settings": of_frames, "by": by})
    cached = _read(store, key, kind, factor, most_frame_bytes(kind, settings, factor, part))
    if cached is not None:
        return cached, True
    media = decode_file(kind, path, settings, factor, part, subtitles)
    # If the file changed meanwhile, it is unknown which content these frames are of.
    is_same = _states(path, subtitles, part) == before
    return media, is_same and store.keep(key, entry_of(media), "frames", "decoded") is Outcome.STORED


# Path and state of a file (size, inode, times of the last changes) or folder (a hash over those of all its files).
State = tuple[str, tuple[int, ...] | str]


def _states(path: str, subtitles: str, part: Part) -> list[State | None]:
    """States of the medium and its subtitles, which change with their contents; None: there is no such file."""

    def state_of(file: str) -> State | None:
        try:
            found = os.stat(file)
        except OSError:
            return None
        return file, (found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    medium = state_of(path) if part.folder_fps is None else (path, folder_state(Path(path)))
    return [medium, *([state_of(subtitles)] if subtitles else [])]


def _contents(kind: MediaKind, states: Sequence[State | None], settings: MediaSettings) -> list[str] | None:
    """Digests of the file and its subtitles; None if they are refused by first bytes or size: some have no end."""
    found: list[str] = []
    try:
        for number, state in enumerate(states):
            if state is None:
                return None
            path, numbers = state
            if isinstance(numbers, str):
                limits = settings.max_video_frames, most_file_bytes(settings)
                found.append(content_of(state, *limits))
                continue
            if number:
                if numbers[0] > settings.max_subtitle_bytes:
                    return None
                found.append(Path(path).suffix.lower())  # names their format
            elif kind == "image":
                check_file_size(numbers[0], path, settings)
            else:
                judge(Path(path))
            found.append(content_of(state))
        return found
    except (DecodeFailure, SampleError, OSError):
        return None


@lru_cache(maxsize=65_536)
def content_of(state: State, most_frames: int = 0, most_bytes: int = 0) -> str:
    """SHA-256 of a file, or of the pictures of a folder (within limits); remembered while its state is the same."""
    path, numbers = Path(state[0]), state[1]
    if isinstance(numbers, str):
        return content_of_frames(list_frames(path, path.name, 1.0, most_frames), most_bytes)
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _read(store: Store, key: str, kind: MediaKind, factor: int, most_bytes: int) -> DecodedMedia | None:
    """The cached medium, if there is one that can be the requested one."""
    entry = store.read(key, most_entry_bytes(most_bytes))
    try:
        return None if entry is None else media_of(entry, kind, factor, most_bytes)
    except Damaged:
        store.remove_damaged(key)
        return None


@cache
def _store(folder: Path, max_bytes: int, since: float | None) -> Store:
    """Features are evicted first: a byte of frames saves far more time, and features are of no use without frames."""
    return Store(folder, KIND, max_bytes, since, giving_way=(FEATURES,))


def most_frame_bytes(kind: MediaKind, settings: MediaSettings, factor: int, part: Part) -> int:
    """More bytes than any medium's frames can have that is read so."""
    count = 1 if kind == "image" else max(settings.most_frames, len(part.times))
    wanted = settings.image_max_pixels if kind == "image" else settings.max_pixels
    # A frame that is narrow beyond measure has one factor for a side. Sides are rounded, none to its double.
    return 4 * 3 * count * max(wanted, MAX_ASPECT_RATIO * factor * factor)


def most_entry_bytes(frame_bytes: int) -> int:
    """More than frames of so many bytes and their subtitles take in an entry."""
    return frame_bytes + frame_bytes // 64 + (32 << 20)


def entry_of(media: DecodedMedia) -> Entry:
    """A medium as an entry."""
    about = {
        "kind": media.kind,
        "shape": list(media.frames.shape),
        "frame_seconds": list(media.frame_seconds),
        "sampled_fps": media.sampled_fps,
        "decoder": media.decoder,
        "subtitles": [asdict(cue) for cue in media.subtitles],
    }
    return Entry({"packed": packed(media.frames)}, about)


def media_of(entry: Entry, kind: MediaKind, factor: int, most_bytes: int) -> DecodedMedia:
    """The medium of an entry.

    Raises:
        Damaged: it describes no medium of this kind, or one of more than ``most_bytes``, or its frames do not unpack.
    """
    try:
        about = entry.about
        shape, seconds = about["shape"], about["frame_seconds"]
        cues = tuple(Cue(**cue) for cue in about["subtitles"])
        numbers = [*seconds, about["sampled_fps"], *(time for cue in cues for time in (cue.start, cue.end))]
        right = (
            about["kind"] == kind
            and _is_shape(shape, factor, most_bytes)
            and len(seconds) == shape[0]
            and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            and all(isinstance(text, str) for text in (about["decoder"], *(cue.text for cue in cues)))
        )
        if not right:
            raise Damaged("it describes no such medium")
        frames = unpacked(entry.tensors["packed"], shape)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise Damaged(str(error)) from error
    return DecodedMedia(kind, frames, tuple(seconds), about["sampled_fps"], about["decoder"], cues)


def _is_shape(shape: Any, factor: int, most_bytes: int) -> bool:
    """Whether it is [F, 3, height, width] of frames that the tower takes."""
    if not isinstance(shape, list) or len(shape) != 4 or not all(type(side) is int and side > 0 for side in shape):
        return False
    return shape[1] == 3 and not shape[2] % factor and not shape[3] % factor and math.prod(shape) <= most_bytes


def packed(frames: np.ndarray) -> np.ndarray:
    """Frames [F, 3, height, width] without loss in about half of their bytes: uint8 [N].

    Colours are alike and so are neighbouring rows, so green and blue are stored as differences from red, then each
    row as one from the row above, and what is left is packed by Zstandard.
    """
    import pyarrow

    left = frames.copy()
    left[:, 1:] -= frames[:, :1]
    left[:, :, 1:] -= left[:, :, :-1].copy()
    return np.frombuffer(pyarrow.compress(left.tobytes(), codec="zstd", asbytes=True), dtype=np.uint8)


def unpacked(content: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The frames of ``packed``. Raises OSError: it unpacks to more or fewer bytes, or to none."""
    import pyarrow

    size = math.prod(shape)
    whole = pyarrow.decompress(content.tobytes(), decompressed_size=size, codec="zstd", asbytes=True)
    frames = np.frombuffer(whole, dtype=np.uint8).reshape(shape)
    frames = np.add.accumulate(frames, axis=2, dtype=np.uint8)
    frames[:, 1:] += frames[:, :1]
    return frames


# A folder of pictures is a video that Pillow decodes. PyAV reads the index of a video for all decoders.
MadeOf = Literal["image", "video", "folder"]
_PACKAGES: Mapping[MadeOf, tuple[str, ...]] = {
    "image": ("qwen-vl-utils", "pillow"),
    "video": ("qwen-vl-utils", "av", "torch"),
    "folder": ("qwen-vl-utils", "pillow", "torch"),
}


@cache
def made_with(kind: MadeOf, decoder: str, device: str) -> Mapping[str, Any]:
    """JSON values by which frames of the same file and settings can differ: our code, libraries, machine.

    Our own code is all of this package: a list of files would miss new ones. ``decoder``, ``device``: of the settings.
    """
    packages = _PACKAGES[kind]
    if decoder in ("decord", "torchcodec") and kind != "folder":
        packages = (*packages, decoder)
    found: dict[str, Any] = {
        "code": source_digest(Path(__file__).parent.glob("*.py")),
        "packages": {package: version_of(package) or "" for package in packages},
        "machine": platform.machine(),
    }
    if kind == "video":
        import av

        found["ffmpeg"] = [av.ffmpeg_version_info, av.library_versions]
        if decoder == "torchcodec":
            found["torchcodec's ffmpeg"] = video_decoders.ffmpeg_versions()
        if device != "cpu":
            # Frames found in the cache need not start CUDA, unless nothing else names the GPU.
            models = gpu_models() or [torch.cuda.get_device_name(video_decoders.gpu_number())]
            found["gpu"] = [*models, *gpu_driver()]
    else:
        from PIL import features

        libraries = ("jpg", "libjpeg_turbo", "webp", "zlib", "zlib_ng")
        found["pillow"] = {name: features.version(name) for name in libraries}
    if kind != "image":
        found["instructions"] = str(torch.backends.cpu.get_cpu_capability())
    return found
