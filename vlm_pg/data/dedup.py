"""Finding duplicates: keys of texts and paths, and a table on disk of those seen."""

from __future__ import annotations

import posixpath
import sqlite3
import unicodedata
from pathlib import Path
from typing import Self


def text_key(text: str) -> str:
    r"""Equal for texts that differ in blanks, line ends or Unicode composition: text_key("a\r\n b ") == "a b"."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def path_key(path: str) -> str:
    r"""Equal for spellings of one path: path_key(" x/..//b\c.mp4") == "b/c.mp4". URLs are kept.

    A backslash counts as a separator, because rows name Windows files.
    """
    path = unicodedata.normalize("NFC", path.strip())
    return path if "://" in path else posixpath.normpath(path.replace("\\", "/"))


class Ledger:
    """Named tables of texts to texts in one temporary file on disk, in constant memory. A context manager.

    ledger.add("ids", "17")  # True: it is new
    ledger.first("questions", "How many?", "17")  # "17": it is new
    ledger.first("questions", "How many?", "18")  # "17"

    Args:
        path: the file, made anew; None: a temporary one that SQLite removes.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None:
            path.unlink(missing_ok=True)
        self._database = sqlite3.connect("" if path is None else path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384", "temp_store=FILE"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute(
            "CREATE TABLE seen (name TEXT, entry BLOB, value BLOB, PRIMARY KEY (name, entry)) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, name: str, entry: str, value: str = "") -> bool:
        """Add an entry; whether it is new."""
        row = (name, _bytes(entry), _bytes(value))
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", row).rowcount == 1

    def first(self, name: str, entry: str, value: str) -> str:
        """The first value of an entry: this one, if it is new."""
        if self.add(name, entry, value):
            return value
        found = self.look(name, entry)
        assert found is not None
        return found

    def look(self, name: str, entry: str) -> str | None:
        """The value of an entry, None without one."""
        found = self._database.execute("SELECT value FROM seen WHERE name = ? AND entry = ?", (name, _bytes(entry)))
        row = found.fetchone()
        return None if row is None else bytes(row[0]).decode(errors="surrogatepass")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.close()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
