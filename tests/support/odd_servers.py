"""A server on this machine that follows a script, and seeded scripts: every odd way to answer a request for a file."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from tests.support.url_strings import SECRET

BODY = bytes(range(256)) * 40
FLOOD = 64 << 20
Script = Callable[["Server"], Iterator[bytes]]
Scripts = dict[str, tuple[Script, int | None]]


class Server:
    """Sends every caller what the script yields. ``sent``: bytes that the machine took of it."""

    def __init__(self, script: Script):
        self._script, self.sent, self.callers = script, 0, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.callers += 1
            with connection:
                connection.settimeout(20)
                try:
                    connection.recv(1 << 18)
                    for piece in self._script(self):
                        connection.sendall(piece)
                        self.sent += len(piece)
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue

    def drip(self, head: bytes, piece: bytes) -> Iterator[bytes]:
        """The head, then the piece again and again until the server is closed."""
        yield head
        while not self._is_closed.is_set():
            yield piece
            time.sleep(0.05)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def answers(part: int) -> Scripts:
    """Scripts by name, each with how many bytes of a file it sends; None for those that must be refused."""
    random_ = random.Random(f"answers/{part}")
    scripts = _fixed() if part == 0 else {}
    for number in range(16):
        name, head, body, whole = random_.choice(_FAMILIES)(random_)
        scripts[f"{part}-{number}-{name}"] = (_send(head + body), whole)
    return scripts


def _send(data: bytes) -> Script:
    return lambda _: iter([data])


def _ok(*headers: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


def _flood(head: bytes, piece: bytes = b"x" * 65536) -> Script:
    def script(_: Server) -> Iterator[bytes]:
        yield head
        for _ in range(FLOOD // len(piece)):
            yield piece

    return script


def _fixed() -> Scripts:
    """Those that take more than one answer, and those without end."""
    chunked = b"Transfer-Encoding: chunked"
    bomb = gzip.compress(bytes(20 << 20))
    return {
        "plain": (_send(_ok() + BODY), len(BODY)),
        "counted": (_send(_ok(b"Content-Length: 10240") + BODY), len(BODY)),
        "chunked": (_send(_ok(chunked) + b"2800\r\n" + BODY + b"\r\n0\r\n\r\n"), len(BODY)),
        "loop": (lambda server: iter([_redirect(f"http://allowed.test:{server.port}/x.mp4".encode())]), None),
        "growing-loop": (lambda server: iter([_redirect(b"/%d.mp4" % server.callers)]), None),
        "redirect-body": (_flood(_redirect(b"http://private.example/x.mp4")), None),
        "redirect-home": (lambda server: iter([_redirect(f"http://127.0.0.1:{server.port}/x.mp4".encode())]), None),
        "flood": (_flood(_ok()), None),
        "chunk-flood": (_flood(_ok(chunked), b"10000\r\n" + b"x" * 65536 + b"\r\n"), None),
        "endless-chunk": (_flood(_ok(chunked) + b"ffffffffffff\r\n"), None),
        "negative-chunk": (_flood(_ok(chunked) + b"-1\r\n"), None),
        "status-flood": (_flood(b"HTTP/1.1 200 "), None),
        "header-flood": (_flood(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000), None),
        "error-flood": (_flood(b"HTTP/1.1 404 No\r\n\r\n"), None),
        "compressed": (_send(_ok(b"Content-Encoding: gzip") + bomb), None),
        "compressed-transfer": (_send(_ok(b"Transfer-Encoding: gzip, chunked") + BODY), None),
        "silent": (lambda server: server.drip(b"", b""), None),
        "mute-after-headers": (lambda server: server.drip(_ok(), b""), None),
    }


def _redirect(target: bytes, code: int = 302) -> bytes:
    return b"HTTP/1.1 %d Found\r\nLocation: %s\r\n\r\n" % (code, target)


Answer = tuple[str, bytes, bytes, int | None]


def _length(random_: random.Random) -> Answer:
    size = len(BODY)
    odd = [
        b"-5",
        b"+10240",
        b"1_0",
        b"10240, 10240",
        b"0x10",
        b"1e3",
        b"10240.0",
        b"",
        b" ",
        "²".encode(),
        b"9" * 5000,
        b"abc",
        b"\x00",
    ]
    stated = random_.choice([*odd, b"%d" % (size + random_.randrange(1, 99)), b"%d" % (2 ** random_.randrange(20, 70))])
    headers = [b"Content-Length: " + stated]
    if random_.random() < 0.4:
        headers = [b"Content-Length: 10240", b"Content-Length: %d" % random_.choice([1, 5000, 10241])]
    return "length", _ok(*headers), BODY, None


def _short(random_: random.Random) -> Answer:
    """More comes than was stated: what was stated is the file."""
    stated = random_.randrange(len(BODY))
    return "short", _ok(b"Content-Length: %d" % stated), BODY, stated


def _chunk(random_: random.Random) -> Answer:
    size = random_.choice(
        [
            b"-1",
            b"-5",
            b"-0x1",
            b"zz",
            b"",
            b";",
            b"f" * 5000,
            b"f" * 70_000,
            b" ",
            b"7fffffffffffffff",
            b"\xff",
            b"2801",
            b"0x",
        ]
    )
    begun = random_.choice([b"", b"5\r\nhello\r\n", b"1;a=b\r\nx\r\n"])
    return "chunk", _ok(b"Transfer-Encoding: chunked"), begun + size + b"\r\n" + BODY, None


def _coding(random_: random.Random) -> Answer:
    name = random_.choice([b"Content-Encoding", b"Transfer-Encoding"])
    return (
        "coding",
        _ok(name + b": " + random_.choice([b"gzip", b"br", b"deflate, gzip", b"\x1b[31m", b"x" * 5000])),
        gzip.compress(BODY),
        None,
    )


def _status(random_: random.Random) -> Answer:
    lines = [
        b"", b"hello", b"HTTP/1.1", b"HTTP/1.1 x", b"HTTP/1.1 -200 OK", b"HTTP/1.1 99999 OK", b"HTTP/1.1 99 OK",
        b"HTTP/9.9 500",
        b"HTTP/1.1 404 \x1b[31mNo", b"HTTP/1.1 206 Partial", b"HTTP/1.1 204 None", b"HTTP/1.1 304 Same",
        b"HTTP/1.1 101 Switch", b"HTTP/1.1 401 Who", b"HTTP/1.1 300 Many", b"HTTP/1.1 500 " + b"x" * 60_000,
        b"ICY 200 OK", b"\x00" * 100,
        b"HTTP/1.1 " + b"2" * 70_000, b"SSH-2.0-x", b"\x16\x03\x01", b"HTTP/1.1 302 Found", b"HTTP/1.1 201 Made",

    ]  # fmt: skip
    return "status", random_.choice(lines) + b"\r\n\r\n", BODY, None


def _headers(random_: random.Random) -> Answer:
    heads = [b"a: b\r\n" * 101, b"a: " + b"x" * 70_000 + b"\r\n", b"\xff: \xfe\r\n" * 200, b": x\r\n" * 500]
    return "headers", b"HTTP/1.1 200 OK\r\n" + random_.choice(heads) + b"\r\n", BODY, None


def _away(random_: random.Random) -> Answer:
    secret = SECRET.encode()
    targets = [
        b"file:///etc/passwd", b"file://localhost/etc/passwd?" + secret, b"ftp://public.example/x.mp4",
        b"gopher://u:" + secret + b"@h/",
        b"data:text/plain,x", b"http://private.example/x.mp4", b"http://127.0.0.1/x.mp4", b"http://2130706433/x.mp4",
        b"//localhost/x.mp4",
        b"http://0x7f.1/", b"http://[::1]/", b"http://[::ffff:127.0.0.1]/x.mp4", b"http://[::1/x.mp4",
        b"http://[::127.0.0.1]/",
        b"http://allowed.test@127.0.0.1/", b"http://u:" + secret + b"@private.example/x.mp4", b"http://a..b/",
        b"http://x:99999/",
        b"http://" + b"a" * 5000 + b"/", b"", b" ", b"http:", b"http://", b"\xff\xfe",
        b"http://metadata.internal/?" + secret, b"//\\localhost/",
        b"http://127%2e0%2e0%2e1/", b"http://mixed.example/x.mp4", b"http://site.example/x.mp4",
        b"javascript:alert(1)", b"http://localhost:1/",
        b"https://localhost/x.mp4", b"http://" + "１２７.０.０.１".encode() + b"/", b"http://[fe80::1%25lo]/",
    ]  # fmt: skip
    head = _redirect(random_.choice(targets), random_.choice([301, 302, 303, 307, 308]))
    return "away", head, b"x" * random_.choice([0, 100_000]), None


_FAMILIES: list[Callable[[random.Random], Answer]] = [_length, _short, _chunk, _coding, _status, _headers, _away, _away]
