"""Archives of media unpacked beside themselves: whole, or refused with nothing written.

An archive comes from somewhere else and says where its files go and how large they are. Only regular files with plain
relative names are taken, and no more bytes than the limits allow, whatever the archive's own headers state.
"""

from __future__ import annotations

import bz2
import gzip
import os
import re
import shutil
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing

# Of xz a few bytes can ask for gigabytes of memory.
_OPENERS: dict[str, Callable[..., Any]] = {".tar": open, ".tar.gz": gzip.open, ".tgz": gzip.open, ".tar.bz2": bz2.open}
SUFFIXES = (*_OPENERS, ".zip")
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
_CHUNK = 1 << 20
# Headers of tar are read at once, and say themselves how long they are.
_LONGEST_READ = 4 << 20
_MOST_PARTS, _LONGEST_NAME, _LONGEST_PATH = 32, 255, 1024
_RESERVED = frozenset('<>:"|?*\\')


@dataclass(frozen=True)
class Limits:
    """What an archive may unpack to.

    Args:
        files: entries, folders among them.
        ratio: bytes unpacked for each byte packed; media are packed already, so more is made to fill a disk.
        free_bytes: bytes that must stay free on the disk.
    """

    files: int = 2_000_000
    ratio: float = 20.0
    small_bytes: int = 64 << 20
    free_bytes: int = 1 << 30

    def most_bytes(self, archive: Path, folder: Path) -> int:
        """How many bytes of an archive may be written into a folder."""
        packed = archive.stat().st_size
        allowed = max(self.small_bytes, int(packed * self.ratio))
        return max(0, min(allowed, shutil.disk_usage(folder).free - self.free_bytes))


class _Refused(Exception):
    """Why an archive is not unpacked, in half a sentence."""


def archives_below(folder: Path) -> list[Path]:
    """All archives in a folder and its folders."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.name.lower().endswith(SUFFIXES) and not path.is_symlink())


def unpack(archive: Path, limits: Limits = Limits(), tell: Callable[[str], None] = lambda line: None) -> int:
    """Unpack an archive into the folder it lies in, unless that was done and all is there. Returns the number of files.

    Everything is written into a hidden folder first and moved when all of it is there, so a refused archive leaves
    nothing, and a killed one is unpacked anew. Files that are there already with the same bytes are left as they are.

    Raises:
        ConfigError: it is damaged, names what it must not, holds links or devices, is too large, or would replace a
            file; with the entry.
    """
    folder = archive.parent
    if is_unpacked(archive):
        return 0
    hidden = folder / f".{archive.name}.unpacking"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        tell(f"Unpacking {archive}")
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
    note_unpacked(archive, names)
    return len(names)


def _write_entries(archive: Path, into: Path, limits: Limits) -> list[PurePosixPath]:
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
            continue  # a folder: those that are needed are made
        # On some disks "A.mp4" and "a.mp4" are one file.
        same = unicodedata.normalize("NFC", str(path)).casefold()
        if same in names:
            raise _Refused(f"it has two entries named '{_shown(name)}'")
        names[same] = path
        if stated > left:
            raise _Refused(f"its files are larger than {limits.most_bytes(archive, into):,} bytes")
        with open_entry() as source:
            left -= _copy(source, into / path, min(left, stated), name)
    for path in names.values():
        if any(unicodedata.normalize("NFC", str(parent)).casefold() in names for parent in path.parents):
            raise _Refused(f"'{_shown(str(path))}' lies in what is a file")
    return list(names.values())


def _copy(source: IO[bytes], path: Path, most: int, name: str) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("xb")
    except (FileExistsError, NotADirectoryError) as error:
        raise _Refused(f"'{_shown(name)}' stands in the place of another entry") from error
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
        if target.is_symlink() or (target.exists() and not _same(hidden / name, target)):
            raise _Refused(f"'{_shown(str(name))}' is there already, with another content")
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.replace(hidden / name, target)


def _same(one: Path, other: Path) -> bool:
    if not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while chunk := left.read(_CHUNK):
            if chunk != right.read(_CHUNK):
                return False
    return True


Entry = tuple[str, int, "Callable[[], IO[bytes]] | None"]


def _tar_entries(archive: Path) -> Iterator[Entry]:
    """Name, stated size and how to read it of each entry, as they come."""
    opener = next(_OPENERS[suffix] for suffix in _OPENERS if archive.name.lower().endswith(suffix))
    with opener(archive, "rb") as packed:
        guarded: Any = _Guarded(packed)
        with tarfile.open(fileobj=guarded, mode="r:") as file:
            yield from _entries_of(file)


def _entries_of(file: Any) -> Iterator[Entry]:
    for entry in file:
        if entry.isdir():
            yield entry.name, 0, None
            continue
        if not entry.isreg() or entry.issparse():
            raise _Refused(f"'{_shown(entry.name)}' is {_kind(entry)}")

        def open_entry(entry: tarfile.TarInfo = entry) -> IO[bytes]:
            found = file.extractfile(entry)
            assert found is not None  # it is a regular file
            return found

        yield entry.name, entry.size, open_entry
        file.members = []  # it would remember every entry


class _Guarded:
    """A file of which nobody reads much at once. ``file``: the archive without its compression."""

    def __init__(self, file: IO[bytes]):
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_READ:
            raise _Refused(f"it has a header of {size:,} bytes")
        return self._file.read(size)


def _kind(entry: tarfile.TarInfo) -> str:
    if entry.issym() or entry.islnk():
        return f"a link to '{_shown(entry.linkname)}'"
    return "a sparse file" if entry.issparse() else "a device, a pipe or of an unknown kind"


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
            # zipfile cuts a name at a NUL and turns backslashes round: what is written is judged.
            if one.orig_filename != one.filename:
                raise _Refused(f"'{_shown(one.orig_filename)}' is no plain name")
            if one.is_dir():
                yield one.filename, 0, None
                continue

            def open_entry(one: zipfile.ZipInfo = one) -> IO[bytes]:
                return file.open(one)

            yield one.filename, one.file_size, open_entry


def _checked(name: str) -> PurePosixPath:
    """The path that a name means, below any folder."""
    plain = name.removeprefix("./").rstrip("/")
    parts = plain.split("/")
    faults: list[tuple[bool, str]] = [
        (name.startswith("/"), "is absolute"),
        (".." in parts, "leaves its folder"),
        ("" in parts or "." in parts, "has empty parts"),
        (any(sign in _RESERVED for sign in name), "has signs that are more than a name on some system"),
        (not _is_plain_text(name), "has control characters or is no Unicode"),
        (any(part != part.strip() or part.endswith(".") for part in parts), "has parts with a space or dot at an end"),
        (any(part.startswith(".") and not _is_of_macos(part) for part in parts), "is hidden"),
        (len(parts) > _MOST_PARTS, f"is deeper than {_MOST_PARTS} folders"),
        (any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts), "has a part that is too long"),
        (len(plain.encode(errors="replace")) > _LONGEST_PATH, "is too long"),
    ]
    for is_so, what in faults:
        if is_so:
            raise _Refused(f"the name '{_shown(name)}' {what}")
    return PurePosixPath(plain)


def _is_of_macos(part: str) -> bool:
    return part == ".DS_Store" or part.startswith("._")


def _is_plain_text(name: str) -> bool:
    return not any(unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in name)


def _shown(name: Any) -> str:
    return printable(str(name), 120)


def is_unpacked(archive: Path) -> bool:
    """Whether an archive was unpacked as it is now, and all of its files are there, as large as they were."""
    try:
        with _note(archive).open(encoding="utf-8", newline="\n") as lines:
            if next(lines, "") != _state(archive):
                return False
            files = (line.rstrip("\n").partition(" ") for line in lines)
            return all((archive.parent / name).stat().st_size == int(size) for size, _, name in files)
    except (OSError, ValueError):  # a file is gone; there is no note, or another file in its place
        return False


def note_unpacked(archive: Path, names: Iterable[PurePosixPath]) -> None:
    """Say that these files, below the archive's folder, are all that it holds."""
    with replacing(_note(archive), durable=False) as file:
        file.write(_state(archive).encode())
        for name in names:
            file.write(f"{(archive.parent / name).stat().st_size} {name}\n".encode())


def _note(archive: Path) -> Path:
    return archive.with_name(f".{archive.name}.unpacked")


def _state(archive: Path) -> str:
    found = archive.stat()
    return f"{found.st_size} {found.st_mtime_ns}\n"


_KINDS = r"t?xz|t?zst|t?lz4|t?lzma|t?lz|tbz2?|gz|bz2|7z|rar"
# split(1) counts aa, ab, ...; no further than fz, as "md" and "py" are something else.
_COUNTS = r"(?:\d{1,4}|[a-f][a-z])"
_NAMES = re.compile(
    rf".+\.(?:{_KINDS}|[rz]\d\d)"
    rf"|.+\.(?:{_KINDS}|tar|tgz|zip)[._-]?(?:part)?[._-]?{_COUNTS}"
    rf"|(?:.*[._-])?part[._-]?{_COUNTS}",
    re.IGNORECASE,
)
_LISTED = 12


def unsupported_below(folder: Path) -> list[Path]:
    """Files in a folder and its folders that are called as such archives are."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if _is_unsupported(path.name))


def unsupported_message(others: list[Path]) -> str:
    """What is said of them."""
    shown = ", ".join(printable(str(path), 300) for path in others[:_LISTED]) + (" ..." if others[_LISTED:] else "")
    return (
        f"Not unpacked: {shown}. Unpacked are {', '.join(SUFFIXES)}, each in one piece. Unpack others by hand, if what "
        "is in them is not there yet; parts are joined first, as in cat x.tar.part_* > x.tar."
    )


def _is_unsupported(name: str) -> bool:
    return not name.lower().endswith(SUFFIXES) and _NAMES.fullmatch(name) is not None
