"""The output folder: its manifest, which files in it may be replaced, its lock, and the program that wrote it."""

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
from vlm_pg.data.manifest import MANIFEST, read_manifest, sizes_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import sync_path, write_bytes_atomic

# Beside records, for people and for checks of what was prepared.
REPORT, SUMMARY = "report.json", "summary.html"
# Files are compared by size, and by content as long as that takes no more than a moment.
_COMPARED_BYTES = 256 << 20


def fingerprint(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of arguments that are JSON values: equal exactly when they are equal."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def sha256_of(paths: Iterable[Path]) -> str:
    """Of one file its SHA-256 made into another, of several that of all in their order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_content(path).digest())
    return digest.hexdigest()


def own_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if this program wrote it: its arguments have its fingerprint."""
    written = read_manifest(folder)
    return None if written is None or written["fingerprint"] != fingerprint(written["arguments"]) else written


def find_prepared(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that holds everything these arguments produce; None of one that was not finished.

    The manifest is written last, so a folder that has one was finished. Which program did is told by its ``program``.

    Raises:
        ConfigError: the folder was finished with other arguments, or files of it are gone or not as they were written.
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
            f"Folder '{folder}' was prepared with other arguments: it has {before}, asked for is {now}. A folder holds "
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
        came = path.stat().st_size
        left -= came
        same = came == expected
        if same and left >= 0:
            same = _content(path).hexdigest() == manifest["written"][name].get("sha256")
        if not same:
            raise ConfigError(
                f"'{printable(str(path), 300)}' is not as it was prepared: it has {came:,} bytes, it had {expected:,}"
                f"{', with another content' if came == expected else ''}. All files its {MANIFEST} lists are needed. "
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
        more: what readers may like to know, as JSON values.
        beside: names of further files that were written; they may be changed or removed.
    """
    content = {"fingerprint": fingerprint(arguments), "program": program(), "arguments": dict(arguments)}
    written = {name: _entry(folder / name) for name in (*files, *beside)}
    content |= {"files": dict(files), "written": written, **(more or {})}
    write_bytes_atomic(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _content(path).hexdigest()}


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


MISSING = "missing_media.txt"
PARTS, IDENTITY = ".parts", "identity.json"  # of what was judged; what these parts depend on
_PLACING = ".placing.json"
_LISTED = 6


def owned(out: Path) -> set[str]:
    """Names in the folder that this program wrote, or was about to write when it was killed."""
    manifest = own_manifest(out)
    names: set[str] = set(_placing(out))
    if manifest is not None:
        written = manifest.get("written")
        names |= {MANIFEST, REPORT, SUMMARY, *manifest["files"], *(written if isinstance(written, dict) else ())}
    elif (out / PARTS / IDENTITY).is_file() and not _is_there(out / MANIFEST):
        names.add(MISSING)
    return names


def refuse_foreign(out: Path, names: Iterable[str]) -> None:
    """Refuse to replace what somebody else put there.

    Raises:
        ConfigError: one of these names in the folder is not this program's.
    """
    ours = owned(out)
    foreign = sorted({name for name in names if name not in ours and _is_there(out / name)})
    if foreign:
        shown = ", ".join(printable(name, 100) for name in foreign[:_LISTED]) + (" ..." if foreign[_LISTED:] else "")
        raise ConfigError(
            f"--out '{printable(str(out), 300)}' holds {shown}, which no {MANIFEST} of this program's lists: somebody "
            "else's files are not replaced. A folder of its own is expected. Choose another --out, or move them away."
        )


def claim(out: Path, names: Iterable[str]) -> None:
    """Say that these names will be this program's, before they are written.

    Raises:
        ConfigError: as ``refuse_foreign``.
    """
    names = set(names)
    refuse_foreign(out, names)
    adopt(out, names)


def adopt(out: Path, names: Iterable[str]) -> None:
    """As ``claim``, of names that are known to be this program's though no manifest lists them."""
    listed = sorted({*names, *_placing(out)})
    write_bytes_atomic(out / _PLACING, json.dumps(listed).encode())


def settle(out: Path) -> None:
    """The manifest is there, and lists what is this program's."""
    (out / _PLACING).unlink(missing_ok=True)


def place(written: Path, out: Path) -> list[str]:
    """Put the files of a folder in the place of those of an earlier run. Returns their names.

    Killed in between it leaves no manifest, and what it left may be replaced. After a power cut files are whole where
    the manifest that follows is.

    Raises:
        ConfigError: as ``refuse_foreign``.
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
    return names


def _placing(out: Path) -> list[str]:
    try:
        names = json.loads((out / _PLACING).read_bytes())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


# All rooms of vlm_pg that pipelines ask: records, media, and rewards, which gold answers must earn.
_PACKAGES = ("data", "media", "rewards")


@cache
def program() -> str:
    """SHA-256 of the sources of the pipelines and of what they ask: another one may prepare otherwise."""
    home = Path(str(vlm_pg.data.__file__)).parent.parent
    rooms = {f"vlm_pg.{name}": home / name for name in _PACKAGES}
    return digest_of({"data_pipelines": Path(str(data_pipelines.__file__)).parent, **rooms})


def digest_of(packages: Mapping[str, Path]) -> str:
    """SHA-256 of all Python files below some folders, with their names there, wherever the folders lie."""
    digest = hashlib.sha256()
    for name, folder in sorted(packages.items()):
        for path in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {content}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """As ``locked``; a second process is refused.

    Raises:
        ConfigError: another process holds the folder, or it cannot be made or written.
    """
    try:
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"Another process is preparing '{folder}' at this moment. A folder has one at a time. Wait for it, or "
            "choose another --out."
        ) from error


@contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the folder while preparing it (it is made if need be); a second process waits and then finds it complete.

    The system releases the lock when the process ends, however it ends. A folder in which nothing was written is
    removed again.

    Raises:
        ConfigError: the folder cannot be made or written.
        BlockingIOError: ``how`` is not to wait, and another process holds it.
    """
    lock, file = folder / ".lock", None
    while file is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _taken(lock, how)
        except BlockingIOError:
            raise
        except FileExistsError:
            if not _may_be_a_folder(folder):
                raise ConfigError(
                    f"Cannot write to --out '{folder}': it is no folder. A folder that can be made and written is "
                    "needed. Choose another."
                ) from None
        except OSError as error:
            raise ConfigError(
                f"Cannot write to --out '{folder}': {error.strerror}. A folder that can be made and written is needed. "
                "Choose another."
            ) from error
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: what was written, or the lock of the next
                folder.rmdir()


def _taken(lock: Path, how: int) -> TextIO | None:
    """The lock, held and open; None where a holder has removed it, or its folder, meanwhile."""
    with suppress(FileNotFoundError), ExitStack() as stack:
        file = stack.enter_context(lock.open("w"))
        fcntl.flock(file, how)
        if os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            stack.pop_all()
            return file
    # Closed by now, whatever happens next: others may be waiting for the very file that was removed.
    return None


def _may_be_a_folder(path: Path) -> bool:
    """Whether it is one, or nothing at this moment. Asked once: holders remove and make it all the time."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return not path.is_symlink()
