"""Servers of a test, and a client that retries at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.odd_server import OddServer


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OddServer]]:
    """Servers put into it are stopped at the end."""
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("vlm_pg.rollout.server.client.PROBE_EVERY_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made: list[OddServer] = []
    yield made
    for server in made:
        server.stop()
