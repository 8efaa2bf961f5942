"""What cannot be used is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vlm_pg.errors import SampleError


@contextmanager
def refused(reason: str, words: str = "") -> Iterator[None]:
    """The block raises a SampleError of this reason, whose message matches ``words``."""
    with pytest.raises(SampleError, match=words or None) as got:
        yield
    assert got.value.reason == reason
