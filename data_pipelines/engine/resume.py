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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipelines.engine.dataset import Split
from data_pipelines.engine.media_finder import MISSING_MEDIA, Found, MediaFinder
from data_pipelines.engine.output_folder import IDENTITY, PARTS
from vlm_pg.errors import SampleError, VlmPgError
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.frame_folder import folder_state
from vlm_pg.media.paths import is_url
from vlm_pg.types import BadSample, MediaRef, Sample

if TYPE_CHECKING:
    from vlm_pg.media.decode_file import MediaFacts  # it imports torch

_BEGUN_ANEW = "\nbegun with --overwrite"
# Refusals that depend on files below the media root, not on the row.
_OF_FILES = (MISSING_MEDIA, "ambiguous_media", "outside_root")
PRAGMAS = ("journal_mode=TRUNCATE", "synchronous=OFF", "cache_size=-16384")
_BATCH = 256
# Facts for splits and summaries; times of frames are for prompts only.
_FACTS = ("content", "seconds", "frames", "height", "width", "visual_tokens")
_TABLE = (
    "CREATE TABLE IF NOT EXISTS media"
    " (number INTEGER PRIMARY KEY, medium TEXT UNIQUE NOT NULL, state TEXT NOT NULL DEFAULT '', outcome TEXT)"
)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one question: one of ``sample``, ``refused`` and ``skipped`` (the reason) is set.

    ``keys``: what training and evaluation must not share, of all questions that were parsed, refused ones too: paths of
    media, or without media the question. ``facts``: of a sample's media, once they were probed. ``found``: results of
    the media finder.
    """

    split: Split
    sample: Sample | None = None
    refused: BadSample | None = None
    skipped: str = ""
    keys: tuple[str, ...] = ()
    facts: tuple[MediaFacts, ...] = ()
    found: tuple[Found, ...] = ()


def remove_parts(out: Path) -> None:
    """Remove the parts of a run that has written everything."""
    shutil.rmtree(out / PARTS, ignore_errors=True)


class Spool:
    """Judged parts in the folder ``.parts`` of an output folder, each written whole once.

    A part is a line for each verdict, and a last one with the number of rows and the digest of the lines: after a power
    cut a file may be empty, or have holes.

    Args:
        identity: what the parts depend on, as JSON; parts of another identity are removed.
        anew: continue only parts of a run that began anew as well.
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
            if name.endswith(".tmp"):  # of a killed run
                (self.folder / name).unlink()

    def has(self, number: int, rows: int) -> bool:
        """Whether a part is complete, with the verdicts of so many rows."""
        read = self._read(number)
        return read is not None and read[1]["rows"] == rows

    def write(self, number: int, rows: int, verdicts: Sequence[Verdict]) -> None:
        """Write a part, the outcome of so many rows. It appears whole or not at all."""
        given = ({k: value for k, value in asdict(one).items() if value not in (None, "", ())} for one in verdicts)
        body = "".join(json.dumps(fields) + "\n" for fields in given).encode()
        end = {"rows": rows, "sha256": hashlib.sha256(body).hexdigest()}
        write_bytes_atomic(self._path(number), body + json.dumps(end).encode() + b"\n", durable=False)

    def verdicts(self, count: int) -> Iterator[Verdict]:
        """Of the first ``count`` parts, in order; one part is in memory at a time.

        Raises VlmPgError: a part is not as it was written.
        """
        for number in range(count):
            if (read := self._read(number)) is None:
                raise VlmPgError(
                    f"'{self._path(number)}' is not as this run wrote it: it was removed or changed, or that disk is "
                    "at fault. Give the same command again: what is missing is judged again."
                )
            yield from _verdicts(read[0])

    def forget(self, is_stale: Callable[[Verdict], bool]) -> int:
        """Remove the parts with a stale verdict, so that they are judged again. Returns their number."""
        removed = 0
        for path in sorted(self.folder.glob("*.jsonl")):
            read = self._read(int(path.stem)) if path.stem.isdecimal() else None
            if read is None or any(map(is_stale, _verdicts(read[0]))):
                path.unlink()
                removed += 1
        return removed

    def _read(self, number: int) -> tuple[bytes, dict[str, Any]] | None:
        """The lines of verdicts, and the last line; None of a part that is missing or incomplete."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            data = self._path(number).read_bytes()
            start = data.rstrip(b"\n").rfind(b"\n") + 1
            body, end = data[:start], json.loads(data[start:])
            return (body, end) if end["sha256"] == hashlib.sha256(body).hexdigest() else None
        return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:07d}.jsonl"


def _verdicts(body: bytes) -> Iterator[Verdict]:
    for line in body.splitlines():
        fields = json.loads(line)
        if (sample := fields.get("sample")) is not None:
            media = tuple(MediaRef(**ref | {"times": tuple(ref["times"])}) for ref in sample["media"])
            lists = {name: tuple(sample[name]) for name in ("options", "turns")}
            fields["sample"] = Sample(**sample | lists | {"media": media})
        if "refused" in fields:
            fields["refused"] = BadSample(**fields["refused"])
        fields["keys"], fields["found"] = tuple(fields.get("keys", ())), tuple(map(tuple, fields.get("found", ())))
        yield Verdict(**fields)


class StaleVerdicts:
    """Whether a verdict may differ now, because media were added or removed. Probed facts are ``MediaBook``'s to check.

    Args:
        finder: as of a run that begins now.
    """

    def __init__(self, finder: MediaFinder):
        self._finder = finder

    def __call__(self, verdict: Verdict) -> bool:
        if verdict.refused is not None and verdict.refused.reason in _OF_FILES:
            return True
        # A file that was added or moved may take precedence, or make the name ambiguous.
        if not all(self._is_found_at(*found) for found in verdict.found):
            return True
        if verdict.sample is not None:
            media = verdict.sample.media
            folders = {ref.path for ref in media if ref.folder_fps is not None}
            paths = [path for ref in media for path in (ref.path, ref.subtitles) if path]
            # Subtitles that were missing: the record does without.
            if any(self._exists(path) for path, *_ in verdict.found if path not in paths):
                return True
        else:  # refused after its media were found: a missing medium would be reported first
            paths, folders = [path for path, *_ in verdict.found] if verdict.keys else [], set()
        return any(not self._exists(path, path in folders) for path in paths)

    def _is_found_at(self, path: str, name: str, folder: str | None, annotations: str | None) -> bool:
        try:
            return self._finder.locate(name, folder, None if annotations is None else Path(annotations)) == path
        except SampleError:  # ambiguous now
            return False

    def _exists(self, path: str, is_folder: bool = False) -> bool:
        """Whether a file is there and not empty: after a power cut media from inside rows may be."""
        if is_url(path):
            return True
        try:
            found = (self._finder.root / path.removeprefix("file://")).stat()
            if is_folder:
                return stat.S_ISDIR(found.st_mode)
            return stat.S_ISREG(found.st_mode) and found.st_size > 0
        except (OSError, ValueError):  # a name that no file system takes
            return False


class MediaBook:
    """The media of questions and the result of probing each, on disk, so that a killed run probes none twice.

    Writes survive a killed process. After a power cut the file may be damaged: then it is made anew.

    Args:
        path: the file.
        root: the media root, for files' sizes and modification times: results of changed files are dropped.
    """

    def __init__(self, path: Path, root: Path):
        self._root = root
        self._database = _open_database(path)

    def want(self, media: Iterable[MediaRef]) -> None:
        """Add media to probe, and drop the results of files that have changed since."""
        self._database.execute("BEGIN")
        texts = ((_ref_to_json(ref),) for ref in media)
        self._database.executemany("INSERT OR IGNORE INTO media (medium) VALUES (?)", texts)
        for some in self._batches("number, medium, state", "outcome NOT NULL"):
            changed = [(number,) for number, text, state in some if self.state_of(_ref_from_json(text)) != state]
            self._database.executemany("UPDATE media SET outcome = NULL WHERE number = ?", changed)
        self._database.execute("COMMIT")

    def counts(self) -> tuple[int, int]:
        """The number of media, and of those with a result."""
        wanted, known = self._database.execute("SELECT count(*), count(outcome) FROM media").fetchone()
        return wanted, known

    def unknown(self) -> Iterator[MediaRef]:
        """The media to probe, in the order they were added. Results may be written meanwhile."""
        for some in self._batches("number, medium", "outcome IS NULL"):
            yield from (_ref_from_json(text) for _, text in some)

    def state_of(self, ref: MediaRef) -> str:
        """Sizes and modification times of a medium's files, "" without any."""
        states = []
        for path in filter(None, (ref.path, ref.subtitles)):
            state = "-"
            with suppress(OSError, ValueError):  # a name that no file system takes
                file = self._root / path.removeprefix("file://")
                found = file.stat()
                is_folder = stat.S_ISDIR(found.st_mode)
                state = folder_state(file) if is_folder else f"{found.st_size}:{found.st_mtime_ns}"
            states.append(state)
        return " ".join(states).strip()

    def write(self, ref: MediaRef, state: str, outcome: MediaFacts | SampleError) -> None:
        """Write the result of a probe. ``state``: from before it."""
        result: dict[str, Any] = {}
        if isinstance(outcome, SampleError):
            result["fault"] = [outcome.reason, str(outcome), outcome.trace]
        else:
            result["facts"] = {name: getattr(outcome, name) for name in _FACTS}
        row = (state, json.dumps(result), _ref_to_json(ref))
        self._database.execute("UPDATE media SET state = ?, outcome = ? WHERE medium = ?", row)

    def read(self, ref: MediaRef) -> MediaFacts | SampleError | None:
        """The result for a medium; None where it was not probed."""
        from vlm_pg.media.decode_file import MediaFacts  # torch comes with it: where there are media, not before

        found = self._database.execute("SELECT outcome FROM media WHERE medium = ?", (_ref_to_json(ref),)).fetchone()
        if found is None or found[0] is None:
            return None
        result = json.loads(found[0])
        return MediaFacts(**result["facts"]) if "facts" in result else SampleError(*result["fault"])

    def close(self) -> None:
        self._database.close()

    def _batches(self, columns: str, condition: str) -> Iterator[list[Any]]:
        last = 0
        query = f"SELECT {columns} FROM media WHERE {condition} AND number > ? ORDER BY number LIMIT ?"
        while rows := self._database.execute(query, (last, _BATCH)).fetchall():
            last = rows[-1][0]
            yield rows


def _open_database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        if database.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return _with_table(database)
    except sqlite3.OperationalError:  # the disk, not the file's content
        raise
    except sqlite3.DatabaseError:
        pass
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
