"""One entry in one file: tensors, what describes them, their key, and a checksum of it all.

A file is judged before it is believed. The checksum finds damage; who may write to a cache can make it agree with
anything, so that readers look at what they get as at any other input.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Frames of the longest video at its largest size are some 100 MB. A larger file is no entry.
MOST_BYTES = 4 << 30
# Of what describes the tensors; JSON takes many times its length when it is read.
_MOST_HEADER_BYTES = 16 << 20
_ENTRY = "entry"


@dataclass(frozen=True)
class Entry:
    """An entry's tensors by name, and what describes them, as JSON."""

    tensors: Mapping[str, np.ndarray]
    about: Mapping[str, Any]


class Damaged(Exception):
    """An entry is not as it was written."""


def read_entry(path: Path, kind: str, key: str, most_bytes: int = MOST_BYTES) -> Entry:
    """The entry in a file.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it is not as it was written, another's, no regular file, or larger than ``most_bytes``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = read_regular(path, most_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder, a link, a pipe, a disk that fails
        raise Damaged(str(error)) from error
    try:
        length = int.from_bytes(content[:8], "little")
        if length > _MOST_HEADER_BYTES:
            raise Damaged(f"it states a header of {length} bytes")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_ENTRY])
        tensors = load(content)
        right = (about["kind"], about["key"], about["checksum"]) == (kind, key, _checksum(tensors, about))
        if right:
            return Entry(tensors, json.loads(about["about"]))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(str(error)) from error
    raise Damaged("its checksum is another")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that is no link.

    Raises:
        OSError: there is none, it cannot be read, or it is larger.
    """
    # a pipe must not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is not a regular file")
        if state.st_size > most_bytes:
            raise OSError(f"it has {state.st_size} bytes, more than {most_bytes}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def serialized(kind: str, key: str, entry: Entry) -> bytes | None:
    """The content of an entry's file; None if that would be larger than entries may be."""
    from safetensors.numpy import save

    about = {"kind": kind, "key": key, "about": json.dumps(entry.about, sort_keys=True)}
    tensors = {name: np.ascontiguousarray(value) for name, value in entry.tensors.items()}
    # One value: safetensors would write several in any order, and equal entries should be equal bytes.
    content = save(tensors, {_ENTRY: json.dumps({**about, "checksum": _checksum(tensors, about)}, sort_keys=True)})
    is_small = int.from_bytes(content[:8], "little") <= _MOST_HEADER_BYTES and len(content) <= MOST_BYTES
    return content if is_small else None


def _checksum(tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Of everything that is read from the file; against damage, not against people who may write there."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name in ("kind", "key", "about"):
        digest.update(f"{name}\0{about[name]}\0".encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    return digest.hexdigest()
