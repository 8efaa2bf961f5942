"""A prepared set whose own folder is taken for that of its media: the message says where they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.errors import SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.types import MediaRef


@pytest.mark.parametrize("told", ["/disk/Video-MME", None, 3])
def test_the_folder_of_the_preparation_is_named(told: object, tmp_path: Path) -> None:
    manifest = {"fingerprint": "f", "arguments": {"media_root": told}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SampleError) as caught:
        resolve(MediaRef("video", "data/a.mp4"), tmp_path, False)
    assert ("data.media_root.NAME=/disk/Video-MME" in str(caught.value)) == (told == "/disk/Video-MME")
