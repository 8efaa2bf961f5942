"""State of an unfinished preparation on disk: judged parts, media facts, and which of them to redo."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.media_finder import REASON, Found, MediaFinder
from data_pipelines.engine.output_folder import IDENTITY, PARTS
from vlm_pg.errors import SampleError, VlmPgError
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.frame_folder import folder_state
from vlm_pg.media.paths import is_url
from vlm_pg.types import BadSample, MediaRef, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts


_BEGUN_ANEW = "\nbegun with --overwrite"


def remove_left(out: Path) -> None:
    """Remove the parts of a run that was killed when it had written everything."""
    shutil.rmtree(out / PARTS, ignore_errors=True)


class Spool:
    """The folder ``.parts`` of an output folder.

    A part is a line for each verdict, and a last one with their number, that of the rows, and the digest of all before:
    after a power cut a file may be empty, or have holes.

    Args:
        out: the output folder.
        identity: what the parts depend on, as JSON; parts of another identity are removed.
        anew: only parts of a run that began anew as well are gone on with.
    """

    def __init__(self, out: Path, identity: str, anew: bool = False):
        self.folder = out / PARTS
        known = self.folder / IDENTITY
        fitting = [identity + _BEGUN_ANEW] if anew else [identity, identity + _BEGUN_ANEW]
        before = known.read_text(encoding="utf-8") if known.is_file() else ""
        if self.folder.exists() and before not in fitting:
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        if before not in fitting:
            write_bytes_atomic(known, fitting[0].encode(), durable=False)
        for name in os.listdir(self.folder):
            if name.endswith(".tmp"):  # what a killed run was writing
                (self.folder / name).unlink()

    def has(self, number: int, rows: int) -> bool:
        """Whether a part is there, whole, with the verdicts of so many rows."""
        read = self._read(number)
        return read is not None and read[1]["rows"] == rows

    def write(self, number: int, rows: int, verdicts: Sequence[Verdict]) -> None:
        """Write a part: what became of so many rows. It appears whole or not at all."""
        body = "".join(json.dumps(_plain(one), ensure_ascii=True) + "\n" for one in verdicts).encode()
        end = {"rows": rows, "verdicts": len(verdicts), "sha256": hashlib.sha256(body).hexdigest()}
        write_bytes_atomic(self._path(number), body + json.dumps(end).encode() + b"\n", durable=False)

    def verdicts(self, count: int) -> Iterator[Verdict]:
        """Of the first ``count`` parts, in order; one is in memory at a time.

        Raises:
            VlmPgError: a part is not as it was written.
        """
        for number in range(count):
            yield from _verdicts(self._whole(number)[0])

    def totals(self, count: int) -> tuple[int, int]:
        """How many rows the first ``count`` parts are of, and how many verdicts they have. Raises as ``verdicts``."""
        ends = [self._whole(number)[1] for number in range(count)]
        return sum(end["rows"] for end in ends), sum(end["verdicts"] for end in ends)

    def forget(self, is_doubtful: Callable[[Verdict], bool]) -> int:
        """Remove the parts that have such a verdict, so that they are judged again. Returns how many they were."""
        removed = 0
        for path in sorted(self.folder.glob("*.jsonl")):
            read = self._read(int(path.stem)) if path.stem.isdecimal() else None
            if read is None or any(map(is_doubtful, _verdicts(read[0]))):
                path.unlink()
                removed += 1
        return removed

    def remove(self) -> None:
        """All parts are used."""
        shutil.rmtree(self.folder)

    def _whole(self, number: int) -> tuple[bytes, dict[str, Any]]:
        read = self._read(number)
        if read is None:
            raise VlmPgError(
                f"'{self._path(number)}' is not as this run wrote it: it was removed or changed, or that disk is at "
                "fault. Give the same command again: what is missing is judged again."
            )
        return read

    def _read(self, number: int) -> tuple[bytes, dict[str, Any]] | None:
        """The lines of verdicts, and what the last line says; None of a part that is not there, or not whole."""
        try:
            data = self._path(number).read_bytes()
        except FileNotFoundError:
            return None
        place = data.rstrip(b"\n").rfind(b"\n") + 1
        body = data[:place]
        try:
            end = json.loads(data[place:])
            return (body, end) if end["sha256"] == hashlib.sha256(body).hexdigest() else None
        except (ValueError, KeyError, TypeError):
            return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:07d}.jsonl"


def _verdicts(body: bytes) -> Iterator[Verdict]:
    return (_verdict(json.loads(line)) for line in body.splitlines())


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {name: value for name, value in asdict(verdict).items() if value not in (None, "", ())}


def _verdict(fields: dict[str, Any]) -> Verdict:
    sample, refused = fields.get("sample"), fields.get("refused")
    if sample is not None:
        media = tuple(MediaRef(**ref | {"times": tuple(ref["times"])}) for ref in sample["media"])
        sample = Sample(**sample | {"media": media, "options": tuple(sample["options"])})
    return Verdict(
        fields["split"],
        sample,
        None if refused is None else BadSample(**refused),
        fields.get("left_out", ""),
        tuple(fields.get("keys", ())),
        found=tuple((path, name, folder, beside) for path, name, folder, beside in fields.get("found", ())),
    )


PRAGMAS = ("journal_mode=TRUNCATE", "synchronous=OFF", "cache_size=-16384")
_AT_A_TIME = 256
# Facts of a medium that splits and summaries ask for; when each frame is shown is for prompts.
_REMEMBERED = ("content", "seconds", "frames", "height", "width", "visual_tokens")
_TABLE = (
    "CREATE TABLE IF NOT EXISTS media"
    " (number INTEGER PRIMARY KEY, medium TEXT UNIQUE NOT NULL, state TEXT NOT NULL DEFAULT '', outcome TEXT)"
)


class MediaBook:
    """The media that questions ask for, with what a look at each of them said.

    What is written stays when the process is killed. After a power cut the file may be damaged: then it begins anew.

    Args:
        path: the file.
        root: the media root, for files' sizes and times of change: what was said of a file that has changed is struck.
    """

    def __init__(self, path: Path, root: Path):
        self._root = root
        self._database = _open_database(path)

    def want(self, media: Iterable[MediaRef]) -> None:
        """Note media to be looked at, and strike what was said of files that have changed since."""
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT OR IGNORE INTO media (medium) VALUES (?)", ((_ref_to_json(ref),) for ref in media)
        )
        self._strike_changed()
        self._database.execute("COMMIT")

    def counts(self) -> tuple[int, int]:
        """How many media are wanted, and of how many it is known what they are."""
        wanted, known = self._database.execute("SELECT count(*), count(outcome) FROM media").fetchone()
        return wanted, known

    def unknown(self) -> Iterator[MediaRef]:
        """The media to look at, in the order in which they were wanted. What is said meanwhile does no harm."""
        last = 0
        query = "SELECT number, medium FROM media WHERE outcome IS NULL AND number > ? ORDER BY number LIMIT ?"
        while rows := self._database.execute(query, (last, _AT_A_TIME)).fetchall():
            last = rows[-1][0]
            yield from (_ref_from_json(text) for _, text in rows)

    def state_of(self, ref: MediaRef) -> str:
        """Sizes and times of change of a medium's files, "" for what is no file."""
        return " ".join(_file_state(self._root, path) for path in (ref.path, ref.subtitles) if path).strip()

    def say(self, ref: MediaRef, state: str, outcome: MediaFacts | SampleError) -> None:
        """Write what a look at a medium said. ``state``: from before the look."""
        said: dict[str, Any] = {}
        if isinstance(outcome, SampleError):
            said["fault"] = [outcome.reason, str(outcome), outcome.trace]
        else:
            said["facts"] = {name: getattr(outcome, name) for name in _REMEMBERED}
        row = (state, json.dumps(said), _ref_to_json(ref))
        self._database.execute("UPDATE media SET state = ?, outcome = ? WHERE medium = ?", row)

    def said_of(self, ref: MediaRef) -> MediaFacts | SampleError | None:
        """What a look at a medium said; None of one that nobody has looked at."""
        from vlm_pg.media.probe import MediaFacts  # torch comes with it: where there are media, not before

        found = self._database.execute("SELECT outcome FROM media WHERE medium = ?", (_ref_to_json(ref),)).fetchone()
        if found is None or found[0] is None:
            return None
        said = json.loads(found[0])
        return MediaFacts(**said["facts"]) if "facts" in said else SampleError(*said["fault"])

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _strike_changed(self) -> None:
        last = 0
        query = "SELECT number, medium, state FROM media WHERE outcome NOT NULL AND number > ? ORDER BY number LIMIT ?"
        while rows := self._database.execute(query, (last, _AT_A_TIME)).fetchall():
            last = rows[-1][0]
            changed = [(number,) for number, text, state in rows if self.state_of(_ref_from_json(text)) != state]
            self._database.executemany("UPDATE media SET outcome = NULL WHERE number = ?", changed)


def _open_database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        if database.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return _with_table(database)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # the disk, not what stands in the file
            raise
    database.close()
    for name in (path, path.with_name(path.name + "-journal")):
        name.unlink(missing_ok=True)
    return _with_table(sqlite3.connect(path, isolation_level=None))


def _with_table(database: sqlite3.Connection) -> sqlite3.Connection:
    for pragma in PRAGMAS:
        database.execute(f"PRAGMA {pragma}")
    database.execute(_TABLE)
    return database


def _ref_to_json(ref: MediaRef) -> str:
    fields = vars(ref) | {"path": ref.path.removeprefix("./")}
    return json.dumps({name: value for name, value in fields.items() if value not in (None, "", ())})


def _ref_from_json(text: str) -> MediaRef:
    fields = json.loads(text)
    return MediaRef(**fields | {"times": tuple(fields.get("times", ()))})


def _file_state(root: Path, path: str) -> str:
    with suppress(OSError, ValueError):  # a name that no file system takes
        file = root / path.removeprefix("file://")
        found = file.stat()
        if stat.S_ISDIR(found.st_mode):
            return folder_state(file)
        return f"{found.st_size}:{found.st_mtime_ns}"
    return "-"


# Why a question was refused, where it is the files below the media root that decide, not the row.
_OF_FILES = (REASON, "ambiguous_media", "outside_root")


class Doubt:
    """Whether a verdict may be another one now. What a look at media said is the ``MediaBook``'s to doubt.

    Args:
        root: the media root.
        finder: finds media as a run that begins now would.
    """

    def __init__(self, root: Path, finder: MediaFinder):
        self._root, self._finder = root, finder

    def __call__(self, verdict: Verdict) -> bool:
        if verdict.refused is not None and verdict.refused.reason in _OF_FILES:
            return True
        # One that was fetched or moved meanwhile may be preferred, or leave it open which is meant.
        if not all(map(self._lies_there, verdict.found)):
            return True
        if verdict.sample is not None:
            media = verdict.sample.media
            folders = {ref.path for ref in media if ref.folder_fps is not None}
            paths = [path for ref in media for path in (ref.path, ref.subtitles) if path]
            # Subtitles that were not there: the record does without.
            if any(self._is_there(path) for path, *_ in verdict.found if path not in paths):
                return True
        else:  # refused after its media were there: of one that is gone that is said first
            paths, folders = [path for path, *_ in verdict.found] if verdict.keys else [], set()
        return any(not self._is_there(path, path in folders) for path in paths)

    def _lies_there(self, found: Found) -> bool:
        path, name, folder, annotations = found
        try:
            return self._finder.path_of(name, folder, None if annotations is None else Path(annotations)) == path
        except SampleError:  # several may be meant now
            return False
        finally:
            self._finder.asked.clear()
            self._finder.latest()

    def _is_there(self, path: str, is_folder: bool = False) -> bool:
        """Not one that is empty: after a power cut media that stood inside rows may be."""
        if is_url(path):
            return True
        try:
            found = (self._root / path.removeprefix("file://")).stat()
            if is_folder:
                return stat.S_ISDIR(found.st_mode)
            return stat.S_ISREG(found.st_mode) and found.st_size > 0
        except (OSError, ValueError):  # a name that no file system takes
            return False
