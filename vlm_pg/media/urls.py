"""URLs of media: which may be asked for, how they are written to the wire, how they are shown."""

from __future__ import annotations

import ipaddress
import re
import string
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from vlm_pg.errors import printable

SCHEMES = ("http", "https")
# everything a URL may hold as it is; "%" because what is quoted already stays so
_AS_WRITTEN = string.ascii_letters + string.digits + "-._~:/?#[]@!$&'()*+,;=%"
_CONTROL = re.compile("[\x00-\x1f\x7f]")
# readers of URLs disagree on anything else: some drop it, some unquote it, some begin the path at it
_NETLOC = re.compile(r"(?:\[[^\[\]@]*\]|[^\[\]@:]*)(?::[^:@\[\]]*)?")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_PORT = re.compile(r"(?:\[[^\]]*\]|[^:]+)(?::[0-9]*)?")
_ZONE = re.compile(r"25[A-Za-z0-9._-]+")  # RFC 6874: its "%" is written "%25"


class BadUrl(ValueError):
    """Not a URL that a file can be fetched from. The message does not repeat it."""


def checked_url(url: str) -> str:
    """``url`` in ASCII, its path percent-encoded and its host as IDNA.

    Raises:
        BadUrl: another scheme than http and https, no host or no valid one, a user name or password.
    """
    if _CONTROL.search(url):
        raise BadUrl("it holds a control character, such as a line break")
    parts = _split(url)
    if parts.scheme.lower() not in SCHEMES:
        raise BadUrl("its scheme is neither http nor https")
    if "@" in parts.netloc:
        raise BadUrl("it holds a user name or password, which would be repeated in every record of it")
    try:
        host, port = parts.hostname, parts.port
        if not host:
            raise BadUrl("it names no host")
        ascii_host = host if ":" in host else host.encode("idna").decode("ascii")
        is_address = "[" in parts.netloc
        if not _NETLOC.fullmatch(parts.netloc) or is_address != (":" in host) or not _is_host(ascii_host):
            raise BadUrl("its host is not valid")
        shown = f"[{ascii_host}]" if ":" in host else ascii_host
        netloc = shown if port is None else f"{shown}:{port}"
        path, query = (quote(text, safe=_AS_WRITTEN) for text in (parts.path, parts.query))
    except BadUrl:
        raise
    except ValueError as error:  # a port out of range, a label that is empty, too long or of lone surrogates
        raise BadUrl(f"its host, port or path is not valid ({_kind(error)})") from error
    return urlunsplit((parts.scheme.lower(), netloc, path, query, ""))


def _is_host(host: str) -> bool:
    """A name of letters, digits, dots, hyphens and underscores, or an address."""
    if ":" not in host:
        return _HOST.fullmatch(host) is not None
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def url_path(url: str) -> str:
    """The path of a URL. Raises BadUrl."""
    return _split(url).path


def host_of(url: str) -> str:
    """The host of a URL that ``checked_url`` returned, in lower case."""
    return _split(url).hostname or ""


def shown_url(url: str) -> str:
    """For messages: without user name, password and query, which may be secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that does not parse"
    query = "?..." if parts.query else ""
    netloc, path = parts.netloc.rpartition("@")[2], parts.path
    if "@" in url and _PORT.fullmatch(netloc) is None:
        netloc, path = "", "/..."  # a user name and password that are written in another place
    return printable(f"{parts.scheme}://{netloc}{path}{query}", 200)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:  # "http://[::1/x.mp4"
        raise BadUrl("it does not parse as a URL") from error


def _kind(error: ValueError) -> str:
    """What went wrong, without the text it went wrong on."""
    if isinstance(error, UnicodeError):
        return "a label is empty or longer than 63 characters, or something cannot be written in ASCII"
    return "a port is a number up to 65535"
