"""Others' functions that give way for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Inside, these attributes of a module, class or object are others; afterwards it has what it had, and no more.

    What was inherited is inherited again, what a class holds wrapped (a static method, say) is so again, and what the
    owner never had is gone.
    """
    before = {name: vars(owner)[name] for name in others if name in vars(owner)}
    try:
        for name, other in others.items():
            setattr(owner, name, other)
        yield
    finally:
        for name in others:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)
