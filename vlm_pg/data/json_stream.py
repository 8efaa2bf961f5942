"""JSON files value by value: elements of an array, members of an object, lines. Memory holds one value at a time.

``ijson`` does not replace this: it has no line of a value for messages, keeps the last of several values under one name
without a word, and has no limit on the digits of a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import ConfigError, printable

# Python refuses to read longer numbers, because the time it takes grows with the square of their length.
MAX_DIGITS = 4000
_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
# An error so close to the end of the window may be due to a value that goes on behind it: "-Infinit".
_MARGIN = 16


def read_elements(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array, each with the line it begins on, counted from 1.

    A value that cannot be read (a huge number, an object with different values under one name) is ``Unreadable``.

    Raises:
        ConfigError: it is no JSON array; with the line.
    """
    with _open(path) as file:
        text = _Text(path, file)
        hint = "(a record a line would be a .jsonl file)"
        text.expect("[", hint, "Write the array of records alone, or a record a line into a .jsonl file.")
        while text.more("]", "a record must be followed by ',' and a record, or by ']'"):
            line = text.line
            yield line, text.value()


def read_members(path: Path) -> Iterator[tuple[int, str, Any]]:
    """The members of a JSON object, each with the line of its name; see ``read_elements``."""
    with _open(path) as file:
        text = _Text(path, file)
        text.expect("{", "(an array of records begins with '[')", "Give the file as its project publishes it.")
        while text.more("}", "a value must be followed by ',' and a name, or by '}'"):
            line, name = text.line, text.value()
            if not isinstance(name, str):
                raise text.error("does not parse as JSON (a name in quotes is expected)")
            text.colon()
            yield line, name, text.value()


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file of JSON lines, with their lines; empty lines are skipped."""
    with _open(path) as file:
        for number, line in enumerate(_decoded(path, iter(file.readline, "")), start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line, parse_int=_number, object_pairs_hook=_object)
            except json.JSONDecodeError as error:
                raise _error(path, number, f"does not parse as JSON ({error.msg} at column {error.colno})") from error
            except RecursionError as error:
                raise _error(path, number, "is nested too deeply") from error


class _Text:
    """A window over a file's text that moves along with the values. ``path``: for messages."""

    def __init__(self, path: Path, file: TextIO):
        self._path = path
        self._chunks = _decoded(path, iter(lambda: file.read(_CHUNK), ""))
        self._decoder = json.JSONDecoder(parse_int=_number, object_pairs_hook=_object)
        self._window, self._position, self._line, self._counted, self._ended = "", 0, 1, 0, False
        self._first = True

    @property
    def line(self) -> int:
        """The current line, counted from 1."""
        self._line += self._window.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def expect(self, sign: str, hint: str, remedy: str) -> None:
        """Skip the sign that the text begins with; ``remedy``: what to do where it is another."""
        if self._next() != sign:
            found = self._window[self._position : self._position + 20] or "nothing"
            raise _error(self._path, self.line, f"begins with {found!r}, not with '{sign}' {hint}", remedy)
        self._position += 1

    def more(self, closing: str, rule: str) -> bool:
        """Go to the next value; False after the last one."""
        sign = self._next()
        if not self._first and sign == ",":
            self._position += 1
            sign = self._next()
            if sign != closing:
                return True
        elif sign == closing:
            self._position += 1
            if self._next():
                raise self.error(f"goes on after the end of the {'array' if closing == ']' else 'object'}")
            return False
        elif self._first:
            return True
        raise self.error(f"does not parse as JSON ({rule})")

    def colon(self) -> None:
        """Skip the colon after a name."""
        if self._next() != ":":
            raise self.error("does not parse as JSON (a name must be followed by ':')")
        self._position += 1

    def value(self) -> Any:
        """Read the value at the current position."""
        self._next()
        self._first = False
        while True:
            try:
                found, end = self._decoder.raw_decode(self._window, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos + _MARGIN >= len(self._window)
                if is_cut and not self._ended:
                    self._read_on()
                    continue
                line = self.line + self._window.count("\n", self._position, error.pos)
                raise _error(self._path, line, f"does not parse as JSON ({error.msg})") from error
            except RecursionError as error:
                raise self.error("is nested too deeply") from error
            if end + _MARGIN >= len(self._window) and not self._ended:
                self._read_on()  # a number may go on
                continue
            self._position = end
            return found

    def error(self, problem: str) -> ConfigError:
        """The error that names the current line."""
        return _error(self._path, self.line, problem)

    def _next(self) -> str:
        """The sign after white space; "" at the end."""
        while True:
            match = _SPACE.match(self._window, self._position)
            assert match is not None  # it matches no space as well
            self._position = match.end()
            if self._position < len(self._window) or not self._read_on():
                return self._window[self._position : self._position + 1]

    def _read_on(self) -> bool:
        """Drop what was read, and read as much as remains and a chunk; False at the end of the file.

        Doubling the window keeps the time linear in the length of a long value.
        """
        if self._ended:
            return False
        line = self.line
        rest = self._window[self._position :]
        parts, wanted = [rest], len(rest) + 1
        while wanted > 0:
            chunk = next(self._chunks, "")
            if not chunk:
                self._ended = True
                break
            parts.append(chunk)
            wanted -= len(chunk)
        self._window, self._position, self._counted, self._line = "".join(parts), 0, 0, line
        return len(self._window) > len(rest)


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: Exception) -> ConfigError:
    """The error about a file that the system does not let us read."""
    return ConfigError(
        f"Data file '{printable(str(path), 300)}' cannot be read: {getattr(error, 'strerror', None) or error}. A file "
        "of records is expected. Correct the path, or the rights of the file."
    )


def _decoded(path: Path, pieces: Iterator[str]) -> Iterator[str]:
    try:
        yield from pieces
    except OSError as error:
        raise unreadable_file(path, error) from error
    except UnicodeDecodeError as error:
        raise _error(path, _undecodable_line(path), f"is not UTF-8 text ({error.reason})") from error


def _undecodable_line(path: Path) -> int:
    """The decoder knows only the position in its last piece."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return number
    return 1


def _number(digits: str) -> int | Unreadable:
    return int(digits) if len(digits) <= MAX_DIGITS else Unreadable(f"a whole number of {len(digits)} digits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unreadable:
    """An object; with different values under one name it is ambiguous."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if value != values[name]:
                return Unreadable(f"an object that gives '{printable(name, 80)}' different values")
    return values


def _error(path: Path, line: int, problem: str, remedy: str = "Correct that line.") -> ConfigError:
    if _is_wide(path):
        problem, remedy = "is text in UTF-16 or UTF-32", "Write the file again as UTF-8."
    return ConfigError(
        f"{printable(str(path), 300)}:{line}: the file {problem}. An array of records (.json) or one record a line "
        f"(.jsonl) is expected. {remedy}"
    )


def _is_wide(path: Path) -> bool:
    """UTF-16 or UTF-32, by the byte order mark, or zero bytes between ASCII ones."""
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError:
        return False
    return begins.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in begins
