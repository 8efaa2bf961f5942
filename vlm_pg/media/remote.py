"""Downloading media, where the user allows it: http and https to public addresses, bounded in size and silence.

Only hosts that are allowed by name may have other addresses. The address that is checked is the one that is connected
to: a name is looked up once, so that it cannot mean one address at the check and another one afterwards.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import string
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import IO, Any

from vlm_pg.errors import SampleError, printable
from vlm_pg.media.boundary import trace_of
from vlm_pg.media.paths import BadUrl, checked_url, host_of, shown_url
from vlm_pg.media.settings import MediaSettings

CHUNK_BYTES = 1 << 20
_EXPECTED = (OSError, http.client.HTTPException, BadUrl)  # URLError, HTTPError and timeouts are OSErrors


@contextmanager
def download(url: str, settings: MediaSettings) -> Iterator[IO[bytes]]:
    """The file at ``url``, open and without a name in any folder: it is gone when it is closed, or this process killed.

    Raises:
        SampleError: ``download_failed``, or ``download_too_large`` beyond ``max_remote_bytes``.
    """
    with tempfile.TemporaryFile(prefix="vlm_pg_media_") as file:
        try:
            _fetch(checked_url(url), file, settings)
        except (SampleError, MemoryError):
            raise
        except Exception as error:  # no answer of a server is a fault of the program
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise SampleError(
                "download_failed",
                f"'{shown_url(url)}' could not be downloaded: {error or type(error).__name__}. A server that answers "
                f"within {settings.remote_timeout_seconds:g} s is needed. Try again later, or download the file and "
                "give its path.",
                "" if isinstance(error, _EXPECTED) else trace_of(error),
            ) from error
        yield file


def _fetch(url: str, file: IO[bytes], settings: MediaSettings) -> None:
    with opener(settings.remote_private_hosts).open(url, timeout=settings.remote_timeout_seconds) as response:
        _check_whole(response)
        stated = _stated_bytes(response)
        _check_size(url, stated or 0, settings.max_remote_bytes)
        received = 0
        while chunk := response.read(CHUNK_BYTES):
            received += len(chunk)
            _check_size(url, received, settings.max_remote_bytes)
            file.write(chunk)
    if stated is not None and received != stated:
        raise http.client.IncompleteRead(b"", stated - received)
    file.flush()


def _check_whole(response: Any) -> None:
    """Refuse responses whose bytes are not the whole file's."""
    if response.status not in (200, 203):
        raise http.client.HTTPException(f"the server answers {response.status}, not 200 and the whole file")
    for name, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        coding = ", ".join(response.headers.get_all(name, [plain]))
        if coding.strip().lower() != plain:
            raise http.client.HTTPException(f"the server states {name} '{printable(coding, 80)}'")


def _stated_bytes(response: Any) -> int | None:
    """The length the server states; None where it states none."""
    stated = {text.strip() for text in response.headers.get_all("Content-Length", [])}
    if not stated:
        return None
    text = stated.pop()
    if stated or not (text.isascii() and text.isdigit() and len(text) < 20):
        raise http.client.HTTPException("the server states a Content-Length that is no number, or several")
    return int(text)


def _check_size(url: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise SampleError(
            "download_too_large",
            f"'{shown_url(url)}' is larger than {limit_bytes} bytes, the most that is downloaded. Use a smaller file, "
            "or raise media.max_remote_bytes.",
        )


MAX_REDIRECTS = 10
# all other IPv6 addresses are reserved, of old (::127.0.0.1, fec0::1) or of one site, whatever Python says of them
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class PrivateAddress(OSError):
    """The host is at a loopback, private or otherwise not public address."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open Internet. One that carries an IPv4 address is judged by that."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


def connect(host: str, port: int, timeout_seconds: float, may_be_private: bool) -> socket.socket:
    """A connection to the first address of ``host`` that answers.

    Raises:
        PrivateAddress: one of the host's addresses is not public.
        OSError: no address answers.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not may_be_private:
        for *_, address in found:
            if not is_public(str(address[0])):
                raise PrivateAddress(
                    f"host '{host}' is at {address[0]}, which is not public. Public addresses are allowed, and hosts "
                    "named in media.remote_private_hosts"
                )
    cause: OSError = OSError(f"host '{host}' has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout_seconds)
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            cause = error
    raise cause


def opener(private_hosts: Collection[str]) -> urllib.request.OpenerDirector:
    """urllib's opener for http and https alone, whose connections are judged, redirected ones too.

    A proxy of the environment is the user's own choice and may have any address; it looks the host up itself, so then
    the host is judged by how the URL writes it.
    """
    allowed = frozenset(host.lower() for host in private_hosts)
    director = urllib.request.OpenerDirector()
    own = (_Handler(allowed), _Redirects())
    errors = (urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor())
    for handler in (urllib.request.ProxyHandler(), *own, *errors):
        director.add_handler(handler)
    return director


def _is_private_name(host: str) -> bool:
    """By its spelling alone: an address that is not public, in any notation, or a name of this machine."""
    host = host.rstrip(".")
    try:
        return not is_public(host)
    except ValueError:
        pass
    try:
        return not is_public(socket.inet_ntoa(socket.inet_aton(host)))  # "127.1", "2130706433"
    except OSError:
        return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))


class _Response(http.client.HTTPResponse):
    """Refuses chunks of negative size: at -1 Python would read without limit."""

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise ValueError("a chunk of negative size")
        return size


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https; hosts that are not ``allowed`` by name, and not proxied, must have public addresses."""

    def __init__(self, allowed: Collection[str]):
        super().__init__()
        self._allowed = allowed

    def _may_be_private(self, request: urllib.request.Request) -> bool:
        host = host_of(request.full_url)
        if host in self._allowed:
            return True
        proxied = request.has_proxy() or getattr(request, "_tunnel_host", None) is not None
        if proxied and _is_private_name(host):
            raise PrivateAddress(
                f"host '{host}' is not public. Public addresses are allowed, and hosts named in "
                "media.remote_private_hosts"
            )
        return proxied

    def http_open(self, req: urllib.request.Request) -> Any:
        private, is_secure = self._may_be_private(req), req.type == "https"
        base: Any = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection

        class Connection(base):
            response_class = _Response

            def connect(self) -> None:
                self.sock = connect(self.host, self.port, self.timeout or 0.0, private)
                if is_secure and self._tunnel_host:
                    self._tunnel()
                if is_secure:
                    name = self._tunnel_host or self.host
                    self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=name)

        return self.do_open(Connection, req)

    https_open = http_open
    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


class _Redirects(urllib.request.BaseHandler):
    """Follows redirects to URLs that ``checked_url`` accepts, without reading their bodies."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        target = headers.get("Location")
        if target is None:
            return None  # which makes it an error
        fp.close()
        count = getattr(req, "redirects", 0) + 1
        if count > MAX_REDIRECTS:
            raise urllib.error.URLError(f"redirected more than {MAX_REDIRECTS} times")
        # headers are read as Latin-1; their bytes are what was sent
        quoted = urllib.parse.quote(target, encoding="iso-8859-1", safe=string.punctuation)
        try:
            url = checked_url(urllib.parse.urljoin(req.full_url, quoted))
        except ValueError as error:
            why = error if isinstance(error, BadUrl) else "it does not parse as a URL"
            raise urllib.error.URLError(f"redirected to '{shown_url(quoted)}': {why}") from error
        request = urllib.request.Request(url, headers=req.headers, unverifiable=True)
        request.redirects = count  # type: ignore[attr-defined]
        return self.parent.open(request, timeout=req.timeout)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302
