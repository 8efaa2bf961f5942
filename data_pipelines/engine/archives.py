"""Archives of media unpacked beside themselves: whole, or refused with nothing written.

An archive is untrusted: it names the paths and sizes of its files. Only regular files with plain relative names are
taken, and no more bytes than the limits allow, whatever the archive's headers state.
"""

from __future__ import annotations

import bz2
import filecmp
import gzip
import os
import re
import shutil
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing

# xz can need gigabytes of memory for a few bytes.
_OPENERS: dict[str, Callable[..., Any]] = {".tar": open, ".tar.gz": gzip.open, ".tgz": gzip.open, ".tar.bz2": bz2.open}
SUFFIXES = (*_OPENERS, ".zip")
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
_CHUNK = 1 << 20
# Headers of tar state their own length and are read at once.
_MAX_READ = 4 << 20
_MAX_PARTS, _MAX_NAME, _MAX_PATH = 32, 255, 1024
_RESERVED = frozenset('<>:"|?*\\')
# Archives that are not supported, and parts of archives.
_KINDS = r"t?xz|t?zst|t?lz4|t?lzma|t?lz|tbz2?|gz|bz2|7z|rar"
# split(1) counts aa, ab, ...; no further than fz, because "md" and "py" are other files.
_COUNTS = r"(?:\d{1,4}|[a-f][a-z])"
_UNSUPPORTED = re.compile(
    rf".+\.(?:{_KINDS}|[rz]\d\d)"
    rf"|.+\.(?:{_KINDS}|tar|tgz|zip)[._-]?(?:part)?[._-]?{_COUNTS}"
    rf"|(?:.*[._-])?part[._-]?{_COUNTS}",
    re.IGNORECASE,
)
_LISTED = 12
# Name, stated size and how to read an entry; None of a folder.
Entry = tuple[str, int, "Callable[[], IO[bytes]] | None"]


@dataclass(frozen=True)
class Limits:
    """What an archive may unpack to.

    Args:
        files: entries, folders among them.
        ratio: bytes unpacked for each byte packed; media are compressed already, so a larger ratio is an attack.
        small_bytes: allowed for any archive.
        free_bytes: bytes that must stay free on the disk.
    """

    files: int = 2_000_000
    ratio: float = 20.0
    small_bytes: int = 64 << 20
    free_bytes: int = 1 << 30

    def most_bytes(self, archive: Path, folder: Path) -> int:
        """The most bytes that an archive may write into a folder."""
        allowed = max(self.small_bytes, int(archive.stat().st_size * self.ratio))
        return max(0, min(allowed, shutil.disk_usage(folder).free - self.free_bytes))


class _Refused(Exception):
    """Why an archive is not unpacked, in half a sentence."""


def archives_below(folder: Path) -> list[Path]:
    """All archives in a folder and its subfolders."""
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.name.lower().endswith(SUFFIXES) and not path.is_symlink())


def unsupported_below(folder: Path) -> list[Path]:
    """Files in a folder and its subfolders with names of archives that are not unpacked: other kinds, and parts."""
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    others = (path for path in found if not path.name.lower().endswith(SUFFIXES))
    return sorted(path for path in others if _UNSUPPORTED.fullmatch(path.name))


def unsupported_message(others: list[Path]) -> str:
    """The message about them."""
    shown = ", ".join(printable(str(path), 300) for path in others[:_LISTED]) + (" ..." if others[_LISTED:] else "")
    return (
        f"Not unpacked: {shown}. Unpacked are {', '.join(SUFFIXES)}, each in one piece. Unpack others by hand, if what "
        "is in them is not there yet; parts are joined first, as in cat x.tar.part_* > x.tar."
    )


def unpack(archive: Path, limits: Limits = Limits(), log: Callable[[str], None] = lambda line: None) -> int:
    """Unpack an archive into its own folder, unless that was done and all files exist. Returns the number of files.

    Everything is written into a hidden folder first and then moved, so a refused archive leaves nothing, and a killed
    one is unpacked anew. Existing files with the same bytes are kept.

    Raises ConfigError: it is damaged, has a forbidden name, holds links or devices, is too large, or would replace a
    file; with the entry.
    """
    folder = archive.parent
    if is_unpacked(archive):
        return 0
    hidden = folder / f".{archive.name}.unpacking"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        log(f"Unpacking {archive}")
        names = _write_entries(archive, hidden, limits)
        _move(hidden, folder, names)
    except _Refused as why:
        raise ConfigError(
            f"Archive '{printable(str(archive), 300)}' is refused: {why}. Regular files with plain relative names, up "
            f"to {limits.ratio:g} times the archive's size, are taken. Fetch it again from its project, or unpack it "
            "by hand if you trust it."
        ) from why
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ConfigError(
            f"Archive '{printable(str(archive), 300)}' cannot be unpacked: {printable(str(error), 200)}. A complete "
            "archive is expected. Fetch it again."
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    # beside the archive: its state, and its files, below its folder, with their sizes
    with replacing(_note(archive), durable=False) as file:
        file.write(_state(archive).encode())
        for name in names:
            file.write(f"{(folder / name).stat().st_size} {name}\n".encode())
    return len(names)


def is_unpacked(archive: Path) -> bool:
    """Whether the archive was unpacked in its present state, and all of its files exist with their sizes."""
    try:
        with _note(archive).open(encoding="utf-8", newline="\n") as lines:
            if next(lines, "") != _state(archive):
                return False
            files = (line.rstrip("\n").partition(" ") for line in lines)
            return all((archive.parent / name).stat().st_size == int(size) for size, _, name in files)
    except (OSError, ValueError):  # a file is gone; there is no note, or another file in its place
        return False


def _note(archive: Path) -> Path:
    return archive.with_name(f".{archive.name}.unpacked")


def _state(archive: Path) -> str:
    found = archive.stat()
    return f"{found.st_size} {found.st_mtime_ns}\n"


def _write_entries(archive: Path, into: Path, limits: Limits) -> list[PurePosixPath]:
    def case_key(path: PurePosixPath) -> str:  # on some disks "A.mp4" and "a.mp4" are one file
        return unicodedata.normalize("NFC", str(path)).casefold()

    left = limits.most_bytes(archive, into)
    names: dict[str, PurePosixPath] = {}
    entries = _zip_entries(archive) if archive.name.lower().endswith(".zip") else _tar_entries(archive)
    for number, (name, stated, open_entry) in enumerate(entries, start=1):
        if number > limits.files:
            raise _Refused(f"it has more than {limits.files} entries")
        if open_entry is None and name.rstrip("/") in (".", ""):
            continue  # the archive's own root
        path = _checked(name)
        if open_entry is None:
            continue  # folders of files are made below
        key = case_key(path)
        if key in names:
            raise _Refused(f"it has two entries named '{_shown(name)}'")
        names[key] = path
        if stated > left:
            raise _Refused(f"its files are larger than {limits.most_bytes(archive, into):,} bytes")
        with open_entry() as source:
            left -= _copy(source, into / path, min(left, stated), name)
    for path in names.values():
        if any(case_key(parent) in names for parent in path.parents):
            raise _Refused(f"'{_shown(str(path))}' lies in what is a file")
    return list(names.values())


def _copy(source: IO[bytes], path: Path, most: int, name: str) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("xb")
    except (FileExistsError, NotADirectoryError) as error:
        raise _Refused(f"'{_shown(name)}' stands instead of another entry") from error
    count = 0
    with target:
        while chunk := source.read(_CHUNK):
            count += len(chunk)
            if count > most:
                raise _Refused(f"'{_shown(name)}' is larger than its header states, or than is allowed")
            target.write(chunk)
    return count


def _move(hidden: Path, folder: Path, names: list[PurePosixPath]) -> None:
    """No file is replaced, and none is written through a link."""
    root = folder.resolve()
    for name in names:
        target = folder / name
        if not target.parent.resolve().is_relative_to(root):
            raise _Refused(f"'{_shown(str(name))}' would be written through a link that leads out of the folder")
        if target.is_symlink() or (target.exists() and not filecmp.cmp(hidden / name, target, shallow=False)):
            raise _Refused(f"'{_shown(str(name))}' is there already, with another content")
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.replace(hidden / name, target)


def _tar_entries(archive: Path) -> Iterator[Entry]:
    opener = next(_OPENERS[suffix] for suffix in _OPENERS if archive.name.lower().endswith(suffix))
    with opener(archive, "rb") as packed:
        guarded: Any = _Guarded(packed)
        with tarfile.open(fileobj=guarded, mode="r:") as opened:
            file: Any = opened  # typeshed does not know its list of members
            for entry in file:
                if entry.isdir():
                    yield entry.name, 0, None
                    continue
                if entry.issym() or entry.islnk():
                    raise _Refused(f"'{_shown(entry.name)}' is a link to '{_shown(entry.linkname)}'")
                if not entry.isreg() or entry.issparse():
                    kind = "a sparse file" if entry.issparse() else "a device, a pipe or of an unknown kind"
                    raise _Refused(f"'{_shown(entry.name)}' is {kind}")
                yield entry.name, entry.size, partial(file.extractfile, entry)
                file.members = []  # it would remember every entry


class _Guarded:
    """A file that refuses to read much at once. ``file``: the decompressed archive."""

    def __init__(self, file: IO[bytes]):
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise _Refused(f"it has a header of {size:,} bytes")
        return self._file.read(size)


def _zip_entries(archive: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(archive) as file:
        entries = file.infolist()
        ends = sorted((one.header_offset, one.header_offset + one.compress_size) for one in entries)
        if any(start < before for (_, before), (start, _) in pairwise(ends)):
            raise _Refused("its entries overlap")
        for one in entries:
            kind = stat.S_IFMT(one.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _Refused(f"'{_shown(one.filename)}' is a link or a device")
            if one.compress_type not in _ZIP_METHODS:
                raise _Refused(f"'{_shown(one.filename)}' is packed by method {one.compress_type}")
            if one.flag_bits & 1:
                raise _Refused(f"'{_shown(one.filename)}' is encrypted")
            # zipfile cuts a name at a NUL and replaces backslashes: the name that is written is checked.
            if one.orig_filename != one.filename:
                raise _Refused(f"'{_shown(one.orig_filename)}' is no plain name")
            yield one.filename, 0 if one.is_dir() else one.file_size, None if one.is_dir() else partial(file.open, one)


def _checked(name: str) -> PurePosixPath:
    """The path of an entry's name, below any folder."""
    plain = name.removeprefix("./").rstrip("/")
    parts = plain.split("/")
    if len(parts) > _MAX_PARTS or len(plain.encode(errors="replace")) > _MAX_PATH or not all(map(_is_plain, parts)):
        why = "is hidden, too long, or more than a path below the folder on some system"
        raise _Refused(f"the name '{_shown(name)}' {why}")
    return PurePosixPath(plain)


def _is_plain(part: str) -> bool:
    """Whether a file or folder can be called so on every system, and is visible (or one that macOS adds)."""
    is_hidden = part.startswith(".") and part != ".DS_Store" and not part.startswith("._")
    has_odd_signs = any(
        sign in _RESERVED or unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in part
    )
    has_odd_end = part != part.strip() or part.endswith(".")
    is_long = len(part.encode(errors="replace")) > _MAX_NAME
    return part != "" and not (is_hidden or has_odd_signs or has_odd_end or is_long)


def _shown(name: Any) -> str:
    return printable(str(name), 120)
