"""Servers of a test, and a client that retries at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.odd_server import OddServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    """One that says token ids, in vLLM's words."""
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("vlm_pg.http.client.LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("vlm_pg.rollout.server.client.PROBE_EVERY_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = OddServer()
    yield server
    server.stop()
