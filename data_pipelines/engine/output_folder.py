"""The output folder: its manifest, which files in it may be replaced, its lock, and the program that wrote it.

The files that may be replaced are those that this program wrote: they are listed in the folder's manifest, or before it
is written in ``.placing.json``. Beside parts of an unfinished run, the list of missing media is that run's.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import data_pipelines
import vlm_pg.data
from vlm_pg.data.prepared import MANIFEST, read_manifest, sizes_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import sync_path, write_bytes_atomic

# Beside records, for people and for checks of what was prepared.
REPORT, SUMMARY = "report.json", "summary.html"
MISSING = "missing_media.txt"
PARTS, IDENTITY = ".parts", "identity.json"  # of judged rows; the inputs of these parts
_CLAIMS = ".placing.json"
_LISTED = 6
# Files are compared by size, and by content up to so many bytes in all.
_COMPARED_BYTES = 256 << 20
# All packages of vlm_pg that pipelines use: records, media, and rewards, which gold answers must earn.
_PACKAGES = ("data", "media", "rewards")


def fingerprint(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of arguments that are JSON values: equal exactly when they are equal."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def sha256_of(paths: Iterable[Path]) -> str:
    """SHA-256 of the files' SHA-256 digests in order."""
    return hashlib.sha256(b"".join(_content(path).digest() for path in paths)).hexdigest()


@cache
def program() -> str:
    """SHA-256 of the sources of the pipelines and the packages they use: another program may prepare otherwise."""
    home = Path(str(vlm_pg.data.__file__)).parent.parent
    packages = {f"vlm_pg.{name}": home / name for name in _PACKAGES}
    return digest_of({"data_pipelines": Path(str(data_pipelines.__file__)).parent, **packages})


def digest_of(packages: Mapping[str, Path]) -> str:
    """SHA-256 of all Python files below these folders, with their relative names, wherever the folders lie."""
    digest = hashlib.sha256()
    for name, folder in sorted(packages.items()):
        for path in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {content}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def own_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if this program wrote it: its fingerprint is that of its arguments."""
    written = read_manifest(folder)
    return None if written is None or written["fingerprint"] != fingerprint(written["arguments"]) else written


def find_prepared(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a complete folder that was prepared with these arguments; None of an incomplete one.

    The manifest is written last. Its ``program`` is the one that prepared the folder.

    Raises ConfigError: the folder was prepared with other arguments, or files of it are missing or changed.
    """
    if not (folder / MANIFEST).exists():
        return None
    written = own_manifest(folder)
    if written is None:
        raise ConfigError(
            f"'{folder / MANIFEST}' is not the manifest of a prepared folder. This program writes that file itself. "
            "Choose another --out, or remove it."
        )
    if written["fingerprint"] != fingerprint(arguments):
        before = {name: value for name, value in written["arguments"].items() if arguments.get(name) != value}
        now = {name: value for name, value in arguments.items() if written["arguments"].get(name) != value}
        raise ConfigError(
            f"Folder '{folder}' was prepared with other arguments: it has {before}, requested is {now}. A folder holds "
            "one prepared set. Choose another --out, or pass --overwrite."
        )
    missing = [name for name in written["files"] if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"Folder '{folder}' lost {', '.join(missing)} since it was prepared. All files its {MANIFEST} lists are "
            "needed. Pass --overwrite to prepare it again."
        )
    _check_files(folder, written)
    return written


def _check_files(folder: Path, manifest: dict[str, Any]) -> None:
    sizes, left = sizes_of(manifest), _COMPARED_BYTES
    for name in sorted(manifest["files"]):
        path, expected = folder / name, sizes.get(name)
        if expected is None:
            continue
        size = path.stat().st_size
        left -= size
        same = size == expected
        if same and left >= 0:
            same = _content(path).hexdigest() == manifest["written"][name].get("sha256")
        if not same:
            raise ConfigError(
                f"'{printable(str(path), 300)}' is not as it was prepared: it has {size:,} bytes, it had {expected:,}"
                f"{', with another content' if size == expected else ''}. All files its {MANIFEST} lists are needed. "
                "Pass --overwrite to prepare it again, or move what you changed yourself into a folder of its own."
            )


def write_manifest(
    folder: Path,
    arguments: Mapping[str, Any],
    files: Mapping[str, int],
    more: Mapping[str, Any] | None = None,
    beside: Iterable[str] = (),
) -> None:
    """Mark the folder as complete. Call it after everything else is written.

    Args:
        files: name -> number of records of each file that readers need.
        more: further JSON values for readers.
        beside: names of further files that were written; they may be changed or removed.
    """
    content = {"fingerprint": fingerprint(arguments), "program": program(), "arguments": dict(arguments)}
    written = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _content(folder / name).hexdigest()}
        for name in (*files, *beside)
    }
    content |= {"files": dict(files), "written": written, **(more or {})}
    write_bytes_atomic(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def owned(out: Path) -> set[str]:
    """Names in the folder that this program wrote, or was about to write when it was killed."""
    manifest = own_manifest(out)
    names: set[str] = set(_claimed(out))
    if manifest is not None:
        written = manifest.get("written")
        names |= {MANIFEST, REPORT, SUMMARY, *manifest["files"], *(written if isinstance(written, dict) else ())}
    elif (out / PARTS / IDENTITY).is_file() and not _exists(out / MANIFEST):
        names.add(MISSING)
    return names


def refuse_foreign(out: Path, names: Iterable[str]) -> None:
    """Refuse to replace files of others.

    Raises ConfigError: a file with one of these names in the folder is not this program's.
    """
    ours = owned(out)
    foreign = sorted({name for name in names if name not in ours and _exists(out / name)})
    if foreign:
        shown = ", ".join(printable(name, 100) for name in foreign[:_LISTED]) + (" ..." if foreign[_LISTED:] else "")
        raise ConfigError(
            f"--out '{printable(str(out), 300)}' holds {shown}, which no {MANIFEST} of this program lists: files of "
            "others are not replaced. A folder of its own is expected. Choose another --out, or move them away."
        )


def claim(out: Path, names: Iterable[str]) -> None:
    """Record that these names will be this program's, before they are written.

    Raises ConfigError: as ``refuse_foreign``.
    """
    names = set(names)
    refuse_foreign(out, names)
    adopt(out, names)


def adopt(out: Path, names: Iterable[str]) -> None:
    """As ``claim``, for names that are known to be this program's though no manifest lists them."""
    write_bytes_atomic(out / _CLAIMS, json.dumps(sorted({*names, *_claimed(out)})).encode())


def settle(out: Path) -> None:
    """Drop the claims once the manifest is written."""
    (out / _CLAIMS).unlink(missing_ok=True)


def publish(written: Path, out: Path) -> None:
    """Replace the files of an earlier run by those of a folder.

    A kill in between leaves no manifest, and files that may be replaced. After a power cut files are whole where the
    manifest that follows is.

    Raises ConfigError: as ``refuse_foreign``.
    """
    names = sorted(path.name for path in written.iterdir())
    earlier = {name for name in owned(out) if Path(name).name == name}  # in this folder
    claim(out, {*names, *earlier} - {MANIFEST})
    for name in (MANIFEST, *sorted(earlier - {MANIFEST})) if earlier else ():
        if not (out / name).is_dir():
            (out / name).unlink(missing_ok=True)
    for name in names:
        sync_path(written / name)
        (written / name).replace(out / name)
    sync_path(out)


def _claimed(out: Path) -> list[str]:
    try:
        names = json.loads((out / _CLAIMS).read_bytes())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


@contextmanager
def locked(folder: Path, waits: bool = True) -> Iterator[None]:
    """Hold the folder's lock while preparing it (it is made if need be); a second process waits, or is refused.

    The system releases the lock when the process ends, however it ends. The lock file is removed, and the folder too
    where nothing was written: ``filelock`` does neither.

    Raises ConfigError: the folder cannot be made or written; another process holds it, and this one does not wait.
    """
    lock, file = folder / ".lock", None
    while file is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _acquired(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process is preparing '{folder}' at this moment. A folder has one at a time. Wait for it, or "
                "choose another --out."
            ) from error
        except OSError as error:
            fault = error.strerror
            if isinstance(error, FileExistsError):
                fault = "it is no folder"
                try:  # one stat only: other processes remove and make the folder all the time
                    if stat.S_ISDIR(folder.stat().st_mode):
                        continue
                except FileNotFoundError:
                    if not folder.is_symlink():
                        continue
            raise ConfigError(
                f"Cannot write to --out '{folder}': {fault}. A folder that can be made and written is needed. Choose "
                "another."
            ) from error
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: files were written, or the next process has its lock
                folder.rmdir()


def _acquired(lock: Path, operation: int) -> TextIO | None:
    """The open lock file; None where its holder has removed it, or its folder, meanwhile."""
    with suppress(FileNotFoundError), ExitStack() as stack:
        file = stack.enter_context(lock.open("w"))
        fcntl.flock(file, operation)
        if os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            stack.pop_all()
            return file
    # Closed by now: other processes may be waiting for the file that was removed.
    return None
