"""Media that stand inside rows, written out once below the media root under names made of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipelines.engine.told import Told, as_vtt
from vlm_pg.data.tables import Embedded
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.content import HEAD_BYTES, shown_head, stored_as

FOLDER = "unpacked"
_NAME_CHARACTERS = 40


class MediaStore:
    """Files below ``root / "unpacked"``. Equal media are one file, whichever rows, data sets or runs they come from.

    Args:
        root: the media root; paths are relative to it.
    """

    def __init__(self, root: Path):
        self._root = root

    def unpack(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with paths in the place of its media, lists of them included.

        Raises:
            SampleError: ``unreadable_media``: a medium is not what its column holds, or nothing that can be read.
            ConfigError: it cannot be written.
        """
        return {name: self._path(name, value) for name, value in row.items()}

    def write_subtitles(self, told: Told) -> str | None:
        """The path of a file with these subtitles; None where nothing is said.

        Raises:
            ConfigError: it cannot be written.
        """
        if not any(cue.text.split() for cue in told.cues):
            return None
        # Half of a sign that a text was cut in is none that can be written.
        return self._stored(as_vtt(told.cues).encode(errors="replace"), ".vtt")

    def _path(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._path(name, one) for one in value]
        return self._write(name, value) if isinstance(value, Embedded) else value

    def _write(self, name: str, medium: Embedded) -> str:
        head = medium.data[:HEAD_BYTES]
        kind, suffix = stored_as(head) or (None, "")
        if kind is None or medium.kind not in (None, kind):
            raise SampleError(
                "unreadable_media",
                f"'{printable(name, 100)}' should hold {medium.kind or 'an image or video'} and {shown_head(head)}. "
                "JPEG, PNG, WebP and the usual video containers are read. Convert it, or remove the row.",
            )
        return self._stored(medium.data, suffix)

    def _stored(self, data: bytes, suffix: str) -> str:
        digest = hashlib.sha256(data).hexdigest()[:_NAME_CHARACTERS]
        relative = Path(FOLDER, digest[:2], f"{digest}{suffix}")
        try:
            _write_once(self._root / relative, data)
        except OSError as error:
            raise ConfigError(
                f"'{self._root / relative}' cannot be written: {error.strerror}. Media that stand inside rows are "
                "written below --media-root. Make room, or choose another."
            ) from error
        return relative.as_posix()


def _write_once(path: Path, data: bytes) -> None:
    """One that is there whole, whatever its name says, is left as it is."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, data, durable=False)
