"""URLs that anybody may have written and servers that answer anything: nobody but whom was asked is connected to.

Of every URL: a typed answer, connections to the addresses an independent reading of it names and to no other, no
secret in a message; of all: no descriptor or temporary file left.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_servers import Server, answers
from tests.support.url_strings import ALLOWED, NAMES, SECRET, allowed_connections, look_up, url
from tests.support.watch import Connections, own_descriptors
from vlm_pg.cache.eviction import entry_files
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.errors import SampleError
from vlm_pg.media import remote
from vlm_pg.media.loader import MediaLoader, import_decoding
from vlm_pg.media.paths import resolve
from vlm_pg.media.remote import download
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef

pytestmark = pytest.mark.matrix


def without_secrets(text: str) -> str:
    """Without user name and password, query and fragment; what has no "://" is the path of a file, and shown."""
    scheme, _, rest = text.removeprefix("file://").partition("://")
    return scheme + re.split("[?#]", re.sub("^/?[^/?#]*@", "", rest))[0]


class Guarded:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        import_decoding()  # torch makes a folder for temporary files
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        monkeypatch.setattr(remote.socket, "getaddrinfo", self._look_up)
        self.connections = Connections()
        self.settings = MediaSettings(remote_timeout_seconds=1, remote_private_hosts=ALLOWED, max_remote_bytes=100_000)
        self.reasons: Counter[str] = Counter()
        self.loader: MediaLoader | None = None
        self.before = own_descriptors()

    @staticmethod
    def _look_up(host: str, port: Any, *_: Any, **__: Any) -> list[Any]:
        found = look_up(host)
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in found
        ]

    def fetch(self, text: str) -> int | SampleError:
        """Bytes that came, or the refusal."""
        answer: int | SampleError
        if self.loader is not None:
            (loaded,) = self.loader.load([MediaRef("video", text)])
            assert isinstance(loaded, SampleError), text
            answer = loaded
        else:
            answer = self._download(text)
        if isinstance(answer, SampleError):
            said = str(answer)
            assert said.isprintable() and len(said) <= 2_010
            assert SECRET not in said + answer.trace or SECRET in without_secrets(text)
        self.reasons[answer.reason if isinstance(answer, SampleError) else "downloaded"] += 1
        return answer

    def _download(self, text: str) -> int | SampleError:
        try:
            with download(resolve(MediaRef("video", text), self.folder, allow_remote=True), self.settings) as file:
                return file.seek(0, os.SEEK_END)
        except SampleError as error:
            return error

    def check_end(self) -> None:
        assert list(self.temporary.iterdir()) == []
        assert own_descriptors() == self.before
        print(f"\n{dict(self.reasons)}")


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path, monkeypatch)
    yield guarded
    guarded.connections.close()


def ask_all(guarded: Guarded, seeds: Iterable[int]) -> int:
    """All URLs; how many led to a connection."""
    connected = 0
    for seed in seeds:
        text = url(seed)
        with guarded.connections.refused() as asked:
            answer = guarded.fetch(text)
        assert isinstance(answer, SampleError), text
        assert answer.trace == "", (text, answer.trace)
        assert set(asked) <= allowed_connections(text), f"{text!r} led to {asked}"
        connected += bool(asked)
    guarded.check_end()
    return connected


def test_all_urls(guarded: Guarded):
    assert ask_all(guarded, range(4_000)) >= 165


def test_urls_with_frames_kept(guarded: Guarded, tmp_path: Path):
    """Through the door that training takes; nothing is kept of them."""
    here = guarded.settings.model_copy(update={"workers": 0})
    kept = CacheSettings(folder=tmp_path / "cache")
    guarded.loader = MediaLoader(here, tmp_path, allow_remote=True, cache_settings=kept)
    ask_all(guarded, range(4_000))
    assert not list(entry_files(tmp_path / "cache"))


def test_each_name_is_judged_by_where_it_is(guarded: Guarded):
    """The guard itself: usual URLs do lead to connections, those of private hosts to none."""
    led = {}
    for name in NAMES:
        with guarded.connections.refused() as asked:
            guarded.fetch(f"http://{name}:8080/x.mp4")
        led[name] = list(asked)
    public = [name for name, addresses in led.items() if addresses]
    assert public == ["public.example", "xn--exmple-cua.org", "six.example", "allowed.test"]
    assert led["public.example"] == [("93.184.216.34", 8080)]


def answered(guarded: Guarded, name: str, script: Callable[[Server], Iterator[bytes]]) -> int | SampleError:
    """What becomes of a URL whose server follows the script: nobody else is connected to, what is taken has an end."""
    with Server(script) as server:
        with guarded.connections.watched() as asked:
            answer = guarded.fetch(f"http://allowed.test:{server.port}/{name}.mp4?token={SECRET}")
        assert set(asked) <= {("127.0.0.1", server.port)}, f"{name} led to {asked}"
        assert answer if isinstance(answer, SampleError) else answer <= guarded.settings.max_remote_bytes
    assert server.sent <= 16 << 20, f"{name}: {server.sent} bytes were taken"
    return answer


@pytest.mark.parametrize("part", range(10))
def test_odd_answers(guarded: Guarded, part: int):
    scripts = answers(part)
    for name, (script, whole) in scripts.items():
        answer = answered(guarded, name, script)
        if whole is None:
            assert isinstance(answer, SampleError), f"{name}: {answer} bytes passed for the file"
            assert answer.reason in ("download_failed", "download_too_large"), name
            assert answer.trace == "", (name, answer.trace)
        else:
            assert answer == whole, name
    assert len(scripts) >= 15
    guarded.check_end()


DRIPS: dict[str, Callable[[Server], Iterator[bytes]]] = {
    "body": lambda server: server.drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "headers": lambda server: server.drip(b"HTTP/1.1 200 OK\r\n", b"a"),
    "continue": lambda server: server.drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trailer": lambda server: server.drip(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"a: b\r\n"
    ),
}


@pytest.mark.parametrize("name", DRIPS)
def test_servers_that_never_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """A little comes now and then, so no silence is too long: the worker's deadline ends it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    settings = MediaSettings(workers=1, deadline_seconds=3, remote_private_hosts=("127.0.0.1",))
    with Server(DRIPS[name]) as server, MediaLoader(settings, tmp_path, allow_remote=True) as loader:
        url = f"http://127.0.0.1:{server.port}/x.mp4?token={SECRET}"
        (result,) = loader.load([MediaRef("video", url)])
    assert isinstance(result, SampleError) and result.reason == "decode_timeout"
    assert SECRET not in str(result) and "/x.mp4?..." in str(result)
    assert list(temporary.iterdir()) == []
