"""When two questions count as one, and when two paths do: by keys that are equal then."""

from __future__ import annotations

import posixpath
import unicodedata


def text_key(text: str) -> str:
    r"""Equal for texts that differ in blanks, line ends or how letters are composed: text_key("a\r\n b ") == "a b"."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def path_key(path: str) -> str:
    r"""Equal for spellings of one path: path_key(" x/..//b\c.mp4") == "b/c.mp4". Addresses stay as they are.

    A backslash counts as a separator, as where rows name files of Windows.
    """
    path = unicodedata.normalize("NFC", path.strip())
    return path if "://" in path else posixpath.normpath(path.replace("\\", "/"))
