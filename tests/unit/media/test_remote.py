"""URLs come from records that anybody may have written: no private address, no secret in a message, errors typed."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.odd_servers import Server
from tests.support.refusals import refused
from tests.support.watch import Doorbell
from vlm_pg.errors import SampleError
from vlm_pg.media import remote
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.paths import checked_url, resolve, shown_url
from vlm_pg.media.remote import download, is_public
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", dict)


def fails(url: str, **changes) -> SampleError:
    settings = MediaSettings(**{"remote_timeout_seconds": 5, **changes})
    with pytest.raises(SampleError) as got, download(url, settings):
        pytest.fail("downloaded")
    return got.value


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://[::1/x.mp4", r"does not parse as a URL\. A URL such as https://host/clip\.mp4 is expected\. Correct"),
        ("http://user:secret@host/x.mp4", r"'http://host/x\.mp4' cannot be fetched: it holds a user name or password"),
        ("http:///x.mp4", "it names no host"),
        ("http://a..b/x.mp4", "a label is empty or longer than 63 characters"),
        ("http://" + "a" * 64 + ".com/x.mp4", "a label is empty or longer than 63"),
        ("http://host:99999/x.mp4", "a port is a number up to 65535"),
        ("http://host:x/x.mp4", "a port is a number up to 65535"),
        ("http://ho st/x.mp4", "its host is not valid"),
        ("http://127%2e0%2e0%2e1/x.mp4", "its host is not valid"),
        ("http://a\\b/x.mp4", "its host is not valid"),
        ("http://[v1.host]/x.mp4", "its host is not valid"),
        ("http://[64:ff9b::5d%38:1]/x.mp4", "its host is not valid"),
        ("http://ho\nst/x.mp4", "it holds a control character, such as a line break"),
        ("http://host/\ud83d.mp4", "cannot be written in ASCII"),
    ],
)
def test_urls_that_are_none(tmp_path: Path, url: str, message: str):
    with pytest.raises(SampleError, match=message) as got:
        resolve(MediaRef("video", url), tmp_path, allow_remote=True)
    assert got.value.reason == "bad_url"
    assert "secret" not in str(got.value)


def test_urls_in_any_script_are_written_in_ascii(tmp_path: Path):
    resolved = resolve(MediaRef("video", "HTTPS://Exämple.org/vidéo %41.mp4?q=ü#x"), tmp_path, allow_remote=True)
    assert resolved == "https://xn--exmple-cua.org/vid%C3%A9o%20%41.mp4?q=%C3%BC"
    assert checked_url(resolved) == resolved


def test_messages_hold_no_secrets():
    assert shown_url("https://user:secret@host/a.mp4?token=secret") == "https://host/a.mp4?..."
    assert "secret" not in shown_url("http://[secret/x.mp4")
    assert shown_url("http://user:secret/more@host/a.mp4") == "http:///..."
    assert shown_url("http:///user:secret@host/a.mp4") == "http:///..."
    assert shown_url("http://host:80/@me/a.mp4") == "http://host:80/@me/a.mp4"


def test_a_url_behind_a_space_is_a_path_and_holds_no_secret_either(tmp_path: Path):
    with pytest.raises(SampleError, match=r"media path ' http://host/a\.mp4\?\.\.\.' names no file") as got:
        resolve(MediaRef("video", " http://user:secret@host/a.mp4?token=secret"), tmp_path, allow_remote=True)
    assert "secret" not in str(got.value)
    with pytest.raises(SampleError, match=r"cannot be looked up: File name too long"):
        resolve(MediaRef("video", "x" * 3_000_000), tmp_path)  # does not end where its time grows with the square
    endless = "x:http://host/" + "x" * 5_000 + ".mp4?token=secret"
    with pytest.raises(SampleError, match=r"looked up: File name too long\. A path to a file") as got:
        resolve(MediaRef("video", endless), tmp_path, allow_remote=True)
    assert "secret" not in str(got.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "::127.0.0.1", "fec0::1", "4000::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str):
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("::ffff:93.184.216.34") and is_public("64:ff9b::5db8:d822") and is_public("2002:5db8:d822::")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_private_addresses_are_not_connected_to(host: str):
    door = Doorbell()
    error = fails(f"http://{host}:{door.port}/x.mp4")
    assert error.reason == "download_failed" and error.trace == ""
    assert "which is not public. Public addresses are allowed, and hosts named in media.remote_private_hosts" in str(
        error
    )
    assert door.rings == 0
    door.close()


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    """However many public ones stand before it; and the address that was judged is the one that is used."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(remote.socket, "getaddrinfo", lambda *_, **__: found)
    assert "host 'example.org' is at 10.0.0.1" in str(fails("http://example.org/x.mp4"))


def failure(answer: bytes, **changes) -> SampleError:
    """Of a download from a server that gives every caller the same bytes."""
    with Server(lambda _: iter([answer])) as server:
        return fails(f"http://127.0.0.1:{server.port}/x.mp4", remote_private_hosts=("127.0.0.1",), **changes)


ANSWERS = {
    "negative-length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
    "endless-length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nabc",
    "odd-length": "HTTP/1.1 200 OK\r\nContent-Length: ²\r\n\r\nabc".encode(),
    "negative-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n",
    "odd-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "endless-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\nabc",
    "no-status": b"hello\r\n\r\n",
    "odd-status": b"HTTP/1.1 999999999999 X\r\n\r\n",
    "many-headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    "nothing": b"",
    "odd-redirect": b"HTTP/1.1 302 X\r\nLocation: http://[::1/x.mp4\r\n\r\n",
    "secret-redirect": b"HTTP/1.1 302 X\r\nLocation: http://user:secret@host/x.mp4\r\n\r\n",
    "file-redirect": b"HTTP/1.1 302 X\r\nLocation: file:///etc/passwd\r\n\r\n",
    "no-redirect": b"HTTP/1.1 302 X\r\n\r\n",
    "secret-scheme": b"HTTP/1.1 302 X\r\nLocation: gopher://user:secret@host/?secret\r\n\r\n",
    "part": b"HTTP/1.1 206 Partial\r\n\r\nabc",
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nabc",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 2\r\n\r\nabc",
    "underscore-length": b"HTTP/1.1 200 OK\r\nContent-Length: 0_2\r\n\r\nabc",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_server_answers_is_no_fault_of_the_program(name: str):
    """Refused, never with another error, never with a secret."""
    error = failure(ANSWERS[name], max_remote_bytes=10_000)
    assert error.reason == "download_failed" and "secret" not in str(error) + error.trace


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 302 X\r\nLocation: http://10.0.0.1/x.mp4\r\n\r\n",
    ],
)
def test_what_is_not_asked_for_is_not_read(head: bytes):
    """A chunk of -1 bytes and the body of a redirect, both without end: most of it is never taken."""

    def flood(_: Server) -> Iterator[bytes]:
        yield head
        for _ in range(1_000):
            yield b"x" * 65_536

    with Server(flood) as server:
        error = fails(f"http://127.0.0.1:{server.port}/x.mp4", remote_private_hosts=("127.0.0.1",))
    assert error.reason == "download_failed"
    assert server.sent < 20_000_000


PLAIN = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (ANSWERS["part"], "download_failed", r"answers 206, not 200 and the whole file\. A server th"),
        (ANSWERS["compressed"], "download_failed", "the server states Content-Encoding 'gzip'"),
        (ANSWERS["two-lengths"], "download_failed", "states a Content-Length that is no number, or several"),
        (ANSWERS["secret-scheme"], "download_failed", "'gopher://host/[?]...': its scheme is neither http nor"),
        (b"HTTP/1.1 404 Gone\r\n\r\n", "download_failed", r"downloaded: .*404.* is needed\. Try again later, or"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "download_failed", "could not be downloaded"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n", "download_too_large", r"larger than 1000 bytes, the most"),
        (PLAIN + b"x" * 2000, "download_too_large", r"larger than 1000 bytes, .* Use a smaller file, or raise"),
    ],
)
def test_why_an_answer_is_refused(answer: bytes, reason: str, message: str):
    with refused(reason, message):
        raise failure(answer, max_remote_bytes=1000)


def test_a_download_is_decoded_also_behind_a_redirect(media_dir: Path):
    content = (media_dir / "h265_video.mp4").read_bytes()
    local = decode_file("video", str(media_dir / "h265_video.mp4"), MediaSettings(), 28)
    moved = b"HTTP/1.1 302 X\r\nLocation: /video.mp4\r\n\r\n"
    with Server(lambda server: iter([moved if server.callers == 1 else PLAIN + content])) as server:
        settings = MediaSettings(remote_private_hosts=("127.0.0.1",))
        media = decode_file("video", f"http://127.0.0.1:{server.port}/a.mp4", settings, 28)
    assert (media.frames == local.frames).all()


def test_redirects_have_an_end():
    with Server(lambda server: iter([b"HTTP/1.1 302 X\r\nLocation: /%d.mp4\r\n\r\n" % server.callers])) as server:
        error = fails(f"http://127.0.0.1:{server.port}/x.mp4", remote_private_hosts=("127.0.0.1",))
    assert "redirected more than 10 times" in str(error)
    assert server.callers == 11


def test_a_redirect_to_a_private_address_is_refused():
    """Also from a host that is allowed by name: that one only."""
    door = Doorbell()
    error = failure(f"HTTP/1.1 302 X\r\nLocation: http://localhost:{door.port}/x.mp4\r\n\r\n".encode())
    assert "which is not public" in str(error) and "'localhost'" in str(error)
    assert door.rings == 0
    door.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost.", "0x7f.1", "10.0.0.1", "db.internal"])
def test_a_proxy_is_not_asked_for_private_hosts(monkeypatch: pytest.MonkeyPatch, host: str):
    door = Doorbell()
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"http": f"http://127.0.0.1:{door.port}"})
    monkeypatch.setattr(urllib.request, "proxy_bypass", lambda _: False)
    assert "is not public. Public addresses are allowed" in str(fails(f"http://{host}/x.mp4"))
    assert door.rings == 0
    fails("http://example.org/x.mp4")  # the proxy hangs up
    assert door.rings == 1
    door.close()


def goes_silent(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000
    server._is_closed.wait()


def test_a_server_that_goes_silent_is_given_up_and_a_killed_download_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    settings = MediaSettings(workers=1, deadline_seconds=3, remote_private_hosts=("127.0.0.1",))
    with Server(goes_silent) as server, MediaLoader(settings, tmp_path, allow_remote=True) as loader:
        url = f"http://127.0.0.1:{server.port}/x.mp4?token=secret"
        (result,) = loader.load([MediaRef("video", url)])
    assert isinstance(result, SampleError) and result.reason == "decode_timeout"
    assert "secret" not in str(result)
    assert list(temporary.iterdir()) == []
    with Server(goes_silent) as server:
        url = f"http://127.0.0.1:{server.port}/x.mp4"
        error = fails(url, remote_private_hosts=("127.0.0.1",), remote_timeout_seconds=0.3)
    assert error.reason == "download_failed" and "answers within 0.3 s" in str(error)
