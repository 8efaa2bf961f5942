"""What a user should know about a cache, said where it can be seen: a worker has no terminal."""

from __future__ import annotations

import warnings

_is_worker = False
_said: set[str] = set()
_waiting: list[str] = []


def collect() -> None:
    """From now on this process is a worker: what it says waits for ``collected``."""
    global _is_worker
    _is_worker = True


def collected() -> list[str]:
    """What has waited."""
    notes = _waiting.copy()
    _waiting.clear()
    return notes


def say(note: str) -> None:
    """A warning; of each text one."""
    if not _is_worker:
        warnings.warn(note, stacklevel=2)
    elif note not in _said:
        _said.add(note)
        _waiting.append(note)
