"""Where the shards of a folder were fetched from, so that another data set is never read in the place of one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import write_bytes_atomic

_ENDING = ".fetched"


class UnknownOrigin(ConfigError):
    """A shard is there, and nothing tells what it was fetched from: other versions of this program left no notes."""


@dataclass(frozen=True)
class Origin:
    """A data set as it was asked for.

    Args:
        name: OWNER/NAME, or the whole path of a folder.
        config: its configuration; None: the only one.
        revision: a commit, branch or tag; None: the newest at that time.
    """

    name: str
    config: str | None
    revision: str | None

    @classmethod
    def of(cls, name: str, config: str | None, revision: str | None) -> Origin:
        """Of the arguments that ``datasets.load_dataset`` takes."""
        return cls(str(Path(name).resolve()) if Path(name).is_dir() else name, config, revision)

    def __str__(self) -> str:
        said = f"'{printable(self.name, 200)}', configuration {self.config or 'default'}"
        return f"{said}, revision {self.revision}" if self.revision else said


def check_origin(shard: Path, origin: Origin) -> None:
    """Refuse a folder that has shards of another data set, or this one from nobody knows where.

    Raises:
        UnknownOrigin: it is not known where the shard is from.
        ConfigError: one of them is of another data set.
    """
    advice = "A folder holds what was fetched of one data set. Choose another --hub-folder, or remove that file"
    for note in sorted(shard.parent.glob(f".*{_ENDING}")):
        fetched = note.with_name(note.name[1 : -len(_ENDING)])
        before = _read(note)
        if fetched.is_file() and before != origin:
            raise ConfigError(
                f"'{printable(str(fetched), 300)}' was fetched from {before or 'another place'}; asked for is "
                f"{origin}. {advice}."
            )
    if shard.is_file() and not _note(shard).is_file():
        raise UnknownOrigin(
            f"'{printable(str(shard), 300)}' is there, and it is not known from where: an earlier version may have "
            f"fetched it. Asked for is {origin}. If that is what it holds, give the folder in the place of --hub; "
            "else choose another --hub-folder, or remove that file."
        )


def note_origin(shard: Path, origin: Origin) -> None:
    """Say where a shard is from, before it is written."""
    write_bytes_atomic(_note(shard), (json.dumps(asdict(origin)) + "\n").encode(errors="backslashreplace"))


def forget_origin(shard: Path) -> None:
    """It could not be fetched."""
    _note(shard).unlink(missing_ok=True)


def _note(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{_ENDING}")


def _read(note: Path) -> Origin | None:
    try:
        return Origin(**json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
