"""A folder of records, media and a configuration."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.checking import Folder
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.settings import ModelSettings


@cache
def _loaded(settings: str) -> WeightlessPolicy:
    return WeightlessPolicy(ModelSettings.model_validate_json(settings))


@pytest.fixture
def folder(tmp_path: Path, media_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """All checks of a process share the loaded processor of a model."""
    monkeypatch.setattr("vlm_pg.check.command.WeightlessPolicy", lambda model: _loaded(model.model_dump_json()))
    return Folder(tmp_path, media_dir)
