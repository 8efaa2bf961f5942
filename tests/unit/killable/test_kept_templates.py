"""What tests keep from one pool to the next is what a new one would be."""

from __future__ import annotations

import os

import pytest

from tests.support.kept_templates import KeptTemplates
from vlm_pg.media.pool import WorkerPool


def _parent(deadline: float = 60.0) -> tuple[int, int]:
    """A worker of a new pool, and what it was forked from."""
    with WorkerPool(1, deadline) as pool:
        return pool.submit(os.getpid).result(), pool.submit(os.getppid).result()


def test_a_template_is_taken_again_for_an_equal_one(kept_templates: KeptTemplates) -> None:
    (first, parent), again = _parent(), _parent()
    assert again[1] == parent and again[0] != first
    assert not os.path.exists(f"/proc/{first}")


def test_another_environment_or_other_arguments_are_another_ones(
    kept_templates: KeptTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parent = _parent()
    assert _parent(61.0)[1] != parent
    monkeypatch.setenv("VLM_PG_OTHER", "1")
    assert _parent()[1] != parent


def test_one_that_has_ended_is_not_taken(kept_templates: KeptTemplates) -> None:
    _, parent = _parent()
    kept_templates.end()
    assert not os.path.exists(f"/proc/{parent}")
    assert _parent()[1] != parent
