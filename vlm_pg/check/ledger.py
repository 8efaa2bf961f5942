"""What was seen first, kept on disk, so that memory does not grow with the data."""

from __future__ import annotations

import sqlite3
from typing import Self


class Ledger:
    """Named tables of texts to values in SQLite's own temporary file, which goes with it. A context manager.

    ledger.first("ids", "17", "a.jsonl:1")  # "a.jsonl:1": it is new
    ledger.first("ids", "17", "a.jsonl:9")  # "a.jsonl:1"
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # the name of a temporary file of its own
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384", "temp_store=FILE"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute(
            "CREATE TABLE seen (name TEXT, entry BLOB, value BLOB, PRIMARY KEY (name, entry)) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def first(self, name: str, entry: str, value: str) -> str:
        """The value that an entry was given first: this one, if it is new."""
        done = self._database.execute(
            "INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (name, _bytes(entry), _bytes(value))
        )
        if done.rowcount == 1:
            return value
        found = self.get(name, entry)
        assert found is not None
        return _text(found)

    def add(self, name: str, entry: str) -> bool:
        """Put an entry without a value; whether it was not there before."""
        done = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, x'')", (name, _bytes(entry)))
        return done.rowcount == 1

    def look(self, name: str, entry: str) -> str | None:
        """The value of an entry, None if there is none."""
        found = self.get(name, entry)
        return None if found is None else _text(found)

    def get(self, name: str, entry: str) -> bytes | None:
        """The value of an entry as it was put, None if there is none."""
        row = self._database.execute(
            "SELECT value FROM seen WHERE name = ? AND entry = ?", (name, _bytes(entry))
        ).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, name: str, entry: str, value: bytes) -> None:
        """Set the value of an entry."""
        self._database.execute("INSERT OR REPLACE INTO seen VALUES (?, ?, ?)", (name, _bytes(entry), value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(content: bytes) -> str:
    return content.decode(errors="surrogatepass")
