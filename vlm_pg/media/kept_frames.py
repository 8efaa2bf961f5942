"""Media decoded once, ever: their sampled and resized frames on disk, by what they were made of.

A file's content, the part of it that is shown, everything in the settings that decides about frames, and what decodes
and resizes (``made_with``) are an entry's key. So the same frames come back bit for bit, whatever a file is called and
whoever asks, and nothing has to be told when a file or a setting changes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from vlm_pg.cache.eviction import Outcome
from vlm_pg.cache.notes import say
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import Damaged, Store, key_of
from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import judge
from vlm_pg.media.content import open_regular
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.frame_entry import entry_of, media_of, most_entry_bytes, most_frame_bytes
from vlm_pg.media.frame_folder import content_of_frames, folder_state, list_frames
from vlm_pg.media.images import check_file_size, most_file_bytes
from vlm_pg.media.made_with import made_with
from vlm_pg.media.selection import WHOLE, Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaKind

KIND, FEATURES = "frames", "features"
# They decide how frames are made, not which and how: everything else is part of the key, limits that refuse a file too.
_NOT_OF_THE_FRAMES = frozenset(
    ("workers", "deadline_seconds", "worker_memory_bytes", "remote_timeout_seconds", "remote_private_hosts")
)


def load_file(
    kind: MediaKind,
    path: str,
    settings: MediaSettings,
    factor: int,
    part: Part = WHOLE,
    subtitles: str = "",
    kept: CacheSettings | None = None,
    since: float | None = None,
) -> DecodedMedia:
    """As ``decode_file``; frames that are in the cache are taken from there, others are put there.

    What a URL names may change, so it is decoded every time; and so are files that cannot be used.

    Args:
        since: as in ``Store``.

    Raises:
        SampleError: as ``decode_file``.
        ConfigError: the cache cannot be used.
    """
    return _loaded(kind, path, settings, factor, part, subtitles, kept, since)[0]


def keep_file(*arguments: Any) -> bool:
    """As ``load_file``, for the cache's sake alone. Whether the frames are there now."""
    return _loaded(*arguments)[1]


def _loaded(
    kind: MediaKind,
    path: str,
    settings: MediaSettings,
    factor: int,
    part: Part,
    subtitles: str,
    kept: CacheSettings | None,
    since: float | None,
) -> tuple[DecodedMedia, bool]:
    """The medium, and whether it is in the cache."""
    if kept is None or kept.folder is None or not kept.frames or "://" in path or "://" in subtitles:
        return decode_file(kind, path, settings, factor, part, subtitles), False
    store = _store(kept.folder, kept.max_bytes, since)
    before = _states(path, subtitles, part)
    contents = _contents(kind, before, settings)
    if contents is None:  # whoever decodes it says why
        return decode_file(kind, path, settings, factor, part, subtitles), False
    parts = {"kind": kind, "content": contents, "part": asdict(part), "factor": factor}
    by = made_with(kind if part.folder_fps is None else "folder", settings.decoder, settings.decoder_device)
    key = key_of({**parts, "settings": _of_frames(settings), "by": by})
    kept_media = _read(store, key, kind, factor, most_frame_bytes(kind, settings, factor, part))
    if kept_media is not None:
        return kept_media, True
    media = decode_file(kind, path, settings, factor, part, subtitles)
    # Of a file that has changed meanwhile these are frames of nobody knows what.
    is_same = _states(path, subtitles, part) == before
    return media, is_same and _write(store, key, media)


def _states(path: str, subtitles: str, part: Part) -> list[State | FolderState | None]:
    """Of the medium and its subtitles, if it has some, what changes when they do."""
    medium: State | FolderState | None = _state(path)
    if part.folder_fps is not None:
        medium = FolderState(path, folder_state(Path(path)))
    return [medium, *([_state(subtitles)] if subtitles else [])]


def _contents(
    kind: MediaKind, states: Sequence[State | FolderState | None], settings: MediaSettings
) -> list[str] | None:
    """What the file and its subtitles hold; None if they are refused by their first bytes or size: some have no end."""
    media, *others = states
    if media is None or None in others:
        return None
    try:
        if isinstance(media, FolderState):
            found = [content_of_folder(media, settings.max_video_frames, most_file_bytes(settings))]
        else:
            if kind == "image":
                check_file_size(media[1], media[0], settings)
            else:
                judge(Path(media[0]))
            found = [content_of(media)]
        for state in others:
            assert isinstance(state, tuple)
            if state[1] > settings.max_subtitle_bytes:
                return None
            found += [Path(state[0]).suffix.lower(), content_of(state)]  # their name says how they are written
        return found
    except (DecodeFailure, SampleError, OSError):
        return None


def _read(store: Store, key: str, kind: MediaKind, factor: int, most_bytes: int) -> DecodedMedia | None:
    """The medium that is kept, if one is that can be what was asked for."""
    entry = store.read(key, most_entry_bytes(most_bytes))
    if entry is None:
        return None
    try:
        return media_of(entry, kind, factor, most_bytes)
    except Damaged:
        store.remove_damaged(key)
        return None


def _write(store: Store, key: str, media: DecodedMedia) -> bool:
    try:
        outcome = store.write(key, entry_of(media))
        if outcome is Outcome.FULL:
            say(
                f"cache.folder '{store.folder}' has no room for more frames within cache.max_gb (what this run has "
                "used is not thrown out): those that do not fit are decoded every time. Raise cache.max_gb, or make "
                "room with vlm-pg cache prune."
            )
        return outcome is Outcome.KEPT
    except OSError as error:  # frames are there all the same
        say(
            f"cache.folder '{store.folder}' cannot be written ({error.strerror or error}): frames are decoded again. "
            "Make room, or lower cache.max_gb."
        )
    return False


State = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class FolderState:
    """A folder of pictures, and a hash of the names, sizes and times of change of all that lies in it."""

    path: str
    state: str


@lru_cache(maxsize=65_536)
def content_of_folder(folder: FolderState, most_frames: int, most_bytes: int) -> str:
    """``content_of_frames``; of a folder in which nothing has changed since it is remembered."""
    path = Path(folder.path)
    return content_of_frames(list_frames(path, path.name, 1.0, most_frames), most_bytes)


@lru_cache(maxsize=65_536)
def content_of(state: State) -> str:
    """SHA-256 of a file's content; of one that has not changed since, by its state, it is remembered."""
    with open_regular(Path(state[0])) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _state(path: str) -> State | None:
    """Path, size, inode and times of the last changes; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


@cache
def _store(folder: Path, max_bytes: int, since: float | None) -> Store:
    """Features give way: a byte of frames saves far more time, and without frames nobody asks for features."""
    return Store(folder, KIND, max_bytes, since, giving_way=(FEATURES,))


def _of_frames(settings: MediaSettings) -> Mapping[str, Any]:
    return settings.model_dump(mode="json", exclude=set(_NOT_OF_THE_FRAMES))
