"""Which ids, media and questions were seen: on disk, so that memory does not grow with the data set."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class Ledger:
    """Named sets of texts in one file, which is made anew and need not survive anything.

    ledger.add("ids", "17")  # True: it is new
    ledger.has("ids", "17")  # True
    ledger.first("asked", "How many?", "17")  # None: it is new
    ledger.first("asked", "How many?", "18")  # "17", what was put there first
    """

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute(
            "CREATE TABLE seen (name TEXT, entry BLOB, value BLOB, PRIMARY KEY (name, entry)) WITHOUT ROWID"
        )

    def add(self, name: str, entry: str, value: str = "") -> bool:
        """Put an entry into a set; whether it was not there before."""
        row = (name, _bytes(entry), _bytes(value))
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", row).rowcount == 1

    def has(self, name: str, entry: str) -> bool:
        """Whether an entry is in a set."""
        found = self._database.execute("SELECT 1 FROM seen WHERE name = ? AND entry = ?", (name, _bytes(entry)))
        return found.fetchone() is not None

    def first(self, name: str, entry: str, value: str) -> str | None:
        """Put an entry with a value into a set; the value of one that was there before, None for a new one."""
        if self.add(name, entry, value):
            return None
        found = self._database.execute("SELECT value FROM seen WHERE name = ? AND entry = ?", (name, _bytes(entry)))
        content: bytes = found.fetchone()[0]
        return content.decode(errors="surrogatepass")

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
