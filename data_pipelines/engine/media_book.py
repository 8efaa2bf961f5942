"""What is known of the media of a set: each file and part once, on disk, so that a killed run looks at none twice."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_pg.errors import SampleError
from vlm_pg.media.frame_folder import folder_state
from vlm_pg.types import MediaRef

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts

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
        self._database = _opened(path)

    def want(self, media: Iterable[MediaRef]) -> None:
        """Note media to be looked at, and strike what was said of files that have changed since."""
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR IGNORE INTO media (medium) VALUES (?)", ((_text(ref),) for ref in media))
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
            yield from (_ref(text) for _, text in rows)

    def state_of(self, ref: MediaRef) -> str:
        """Sizes and times of change of a medium's files, "" for what is no file."""
        return " ".join(_state(self._root, path) for path in (ref.path, ref.subtitles) if path).strip()

    def say(self, ref: MediaRef, state: str, outcome: MediaFacts | SampleError) -> None:
        """Write what a look at a medium said. ``state``: from before the look."""
        said: dict[str, Any] = {}
        if isinstance(outcome, SampleError):
            said["fault"] = [outcome.reason, str(outcome), outcome.trace]
        else:
            said["facts"] = {name: getattr(outcome, name) for name in _REMEMBERED}
        row = (state, json.dumps(said), _text(ref))
        self._database.execute("UPDATE media SET state = ?, outcome = ? WHERE medium = ?", row)

    def said_of(self, ref: MediaRef) -> MediaFacts | SampleError | None:
        """What a look at a medium said; None of one that nobody has looked at."""
        from vlm_pg.media.probe import MediaFacts  # torch comes with it: where there are media, not before

        found = self._database.execute("SELECT outcome FROM media WHERE medium = ?", (_text(ref),)).fetchone()
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
            changed = [(number,) for number, text, state in rows if self.state_of(_ref(text)) != state]
            self._database.executemany("UPDATE media SET outcome = NULL WHERE number = ?", changed)


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        if database.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return _prepared(database)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # the disk, not what stands in the file
            raise
    database.close()
    for name in (path, path.with_name(path.name + "-journal")):
        name.unlink(missing_ok=True)
    return _prepared(sqlite3.connect(path, isolation_level=None))


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    for pragma in PRAGMAS:
        database.execute(f"PRAGMA {pragma}")
    database.execute(_TABLE)
    return database


def _text(ref: MediaRef) -> str:
    fields = vars(ref) | {"path": ref.path.removeprefix("./")}
    return json.dumps({name: value for name, value in fields.items() if value not in (None, "", ())})


def _ref(text: str) -> MediaRef:
    fields = json.loads(text)
    return MediaRef(**fields | {"times": tuple(fields.get("times", ()))})


def _state(root: Path, path: str) -> str:
    with suppress(OSError, ValueError):  # a name that no file system takes
        file = root / path.removeprefix("file://")
        found = file.stat()
        if stat.S_ISDIR(found.st_mode):
            return folder_state(file)
        return f"{found.st_size}:{found.st_mtime_ns}"
    return "-"
