"""A folder of records, media and a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checking import Folder


@pytest.fixture
def folder(tmp_path: Path, media_dir: Path) -> Folder:
    return Folder(tmp_path, media_dir)
