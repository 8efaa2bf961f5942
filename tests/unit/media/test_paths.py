"""Only files below the data root are read; URLs only when allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hostile_paths import REFUSALS, make_root
from tests.support.refusals import refused
from vlm_pg.errors import SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.types import MediaRef


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


@pytest.mark.parametrize("path", ["a.mp4", "./a.mp4", "deep/../a.mp4", "link_in.mp4", "deep/B.MKV"])
def test_files_inside(root: Path, path: str):
    assert resolve(MediaRef("video", path), root) == str((root / path).resolve())


def test_absolute_and_file_urls_inside(root: Path):
    assert resolve(MediaRef("video", f"file://{root}/a.mp4"), root) == str(root.resolve() / "a.mp4")
    assert resolve(MediaRef("image", f"{root}/c.png"), root) == str(root.resolve() / "c.png")


@pytest.mark.parametrize(("kind", "path", "reason", "message"), REFUSALS)
def test_refusals(root: Path, kind, path: str, reason: str, message: str):
    with refused(reason, message):
        resolve(MediaRef(kind, path), root)


def test_allowed_urls_are_still_checked(root: Path):
    url = "https://example.org/clips/A.MP4?x=1"
    assert resolve(MediaRef("video", url), root, allow_remote=True) == url
    for other in ("ftp://example.org/a.mp4", "s3://bucket/a.mp4"):
        with refused("remote_media"):
            resolve(MediaRef("video", other), root, allow_remote=True)
    with refused("unsupported_media"):
        resolve(MediaRef("video", "https://example.org/a.exe"), root, allow_remote=True)


@pytest.mark.parametrize("media_root", ["/disk/Video-MME", None, 3])
def test_the_folder_of_the_preparation_is_named(media_root: object, tmp_path: Path) -> None:
    manifest = {"fingerprint": "f", "arguments": {"media_root": media_root}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SampleError) as caught:
        resolve(MediaRef("video", "data/a.mp4"), tmp_path, False)
    assert ("data.media_root.NAME=/disk/Video-MME" in str(caught.value)) == (media_root == "/disk/Video-MME")
