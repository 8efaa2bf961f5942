"""Only files below the data root are read; URLs only when allowed, and then within limits."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hostile_paths import REFUSALS, make_root
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.paths import resolve
from vlm_pg.media.remote import download
from vlm_pg.media.settings import MediaSettings
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
    with pytest.raises(SampleError, match=message) as got:
        resolve(MediaRef(kind, path), root)
    assert got.value.reason == reason


def test_allowed_urls_are_still_checked(root: Path):
    url = "https://example.org/clips/A.MP4?x=1"
    assert resolve(MediaRef("video", url), root, allow_remote=True) == url
    for refused in ("ftp://example.org/a.mp4", "s3://bucket/a.mp4"):
        with pytest.raises(SampleError) as got:
            resolve(MediaRef("video", refused), root, allow_remote=True)
        assert got.value.reason == "remote_media"
    with pytest.raises(SampleError) as got:
        resolve(MediaRef("video", "https://example.org/a.exe"), root, allow_remote=True)
    assert got.value.reason == "unsupported_media"


class _Handler(http.server.BaseHTTPRequestHandler):
    payload = b""

    def do_GET(self) -> None:
        if self.path == "/slow.mp4":
            threading.Event().wait(2)
            return
        if self.path == "/away.mp4":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/a.mp4")
            self.end_headers()
            return
        if self.path == "/moved.mp4":
            self.send_response(302)
            self.send_header("Location", "/video.mp4")
            self.end_headers()
            return
        self.send_response(200 if self.path != "/gone.mp4" else 404)
        extra = 10 if self.path == "/short.mp4" else 0
        if self.path != "/endless.mp4":
            self.send_header("Content-Length", str(len(self.payload) + extra))
        self.end_headers()
        self.wfile.write(self.payload)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_download_is_decoded(server: str, media_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Handler, "payload", (media_dir / "h265_video.mp4").read_bytes())
    local = decode_file("video", str(media_dir / "h265_video.mp4"), MediaSettings(), 28)
    for name in ("video.mp4", "moved.mp4"):
        media = decode_file("video", f"{server}/{name}", MediaSettings(remote_private_hosts=("127.0.0.1",)), 28)
        assert (media.frames == local.frames).all()


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("gone.mp4", "download_failed", r"could not be downloaded: .*404.* is needed\. Try again later, or download"),
        ("away.mp4", "download_failed", "neither http nor https"),
        ("short.mp4", "download_failed", "could not be downloaded"),
        ("slow.mp4", "download_failed", "answers within 0.3 s"),
        ("video.mp4", "download_too_large", r"larger than 1000 bytes, the most .* Use a smaller file, or raise"),
        ("endless.mp4", "download_too_large", "larger than 1000 bytes"),
    ],
)
def test_downloads_that_fail(server: str, monkeypatch, name: str, reason: str, message: str):
    monkeypatch.setattr(_Handler, "payload", b"x" * (2000 if reason == "download_too_large" else 10))
    settings = MediaSettings(remote_timeout_seconds=0.3, max_remote_bytes=1000, remote_private_hosts=("127.0.0.1",))
    with pytest.raises(SampleError, match=message) as got, download(f"{server}/{name}", settings):
        pytest.fail("downloaded")
    assert got.value.reason == reason


@pytest.mark.parametrize("told", ["/disk/Video-MME", None, 3])
def test_the_folder_of_the_preparation_is_named(told: object, tmp_path: Path) -> None:
    manifest = {"fingerprint": "f", "arguments": {"media_root": told}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SampleError) as caught:
        resolve(MediaRef("video", "data/a.mp4"), tmp_path, False)
    assert ("data.media_root.NAME=/disk/Video-MME" in str(caught.value)) == (told == "/disk/Video-MME")
