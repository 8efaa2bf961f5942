"""Warnings about a cache: workers have no terminal, so theirs are collected by the parent."""

from __future__ import annotations

import warnings

_is_worker = False
_warned: set[str] = set()
_waiting: list[str] = []


def collect() -> None:
    """Make this process a worker: its warnings wait for ``collected``."""
    global _is_worker
    _is_worker = True


def collected() -> list[str]:
    """Return and clear the waiting warnings."""
    notes = _waiting.copy()
    _waiting.clear()
    return notes


def warn_once(note: str) -> None:
    """Warn once for each text."""
    if not _is_worker:
        warnings.warn(note, stacklevel=2)
    elif note not in _warned:
        _warned.add(note)
        _waiting.append(note)
