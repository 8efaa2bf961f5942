"""From a media reference to a file or URL that may be read: confined to the data root, of a known kind."""

from __future__ import annotations

import ipaddress
import re
import string
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import get_args
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from vlm_pg.data.prepared import read_manifest
from vlm_pg.errors import SampleError, printable
from vlm_pg.types import MediaKind, MediaRef

EXTENSIONS = {
    "video": (".mp4", ".mkv", ".mov", ".webm", ".avi"),
    "image": (".jpg", ".jpeg", ".png", ".webp"),
    "subtitles": (".srt", ".vtt"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEME_CHARS = string.ascii_letters + string.digits + "+.-"


@dataclass(frozen=True)
class SubtitlesRef:
    """The file of subtitles that a record names; confined like media."""

    path: str
    kind: str = "subtitles"


Ref = MediaRef | SubtitlesRef


def is_url(path: str) -> bool:
    """Whether a record's path is a URL."""
    return _SCHEME.match(path.removeprefix("file://")) is not None


def resolve(ref: Ref, root: Path, allow_remote: bool = False) -> str:
    """The absolute path of the file ``ref`` names, or its URL where remote media are allowed.

    Its path is relative to the data root, absolute inside of it, ``file://`` plus a path, or a URL; links are resolved.
    A video with ``folder_fps`` must be a folder; its files are judged where they are read.

    Raises:
        SampleError: ``remote_media``, ``outside_root``, ``missing_media`` or ``unsupported_media``.
    """
    text = ref.path.removeprefix("file://")
    scheme = _SCHEME.match(text)
    is_folder = isinstance(ref, MediaRef) and ref.folder_fps is not None
    if scheme:
        if is_folder:
            raise _no_folder(ref, "is a URL")
        if not allow_remote or scheme[1].lower() not in SCHEMES:
            raise SampleError(
                "remote_media",
                f"{_role(ref)} path '{shown_url(ref.path)}' is a URL. Files under the data root are read, http or "
                "https URLs only with data.allow_remote=true. Download the file, or set that option.",
            )
        return _remote(ref, text)
    real_root = root.resolve()
    path = _safely(ref, (real_root / text).resolve)
    if not path.is_relative_to(real_root):
        raise SampleError(
            "outside_root",
            f"{_role(ref)} path '{_shown(ref.path)}' leaves the data root '{root}' once '..' and links are resolved. "
            "Only files below that folder are read. Move the file there, or set data.media_root to a folder that holds "
            "them all.",
        )
    if not _safely(ref, path.exists):
        raise SampleError(
            "missing_media",
            f"{_role(ref)} path '{_shown(ref.path)}' names no file in the data root '{root}'. Paths relative to that "
            f"folder are expected. Fetch the file, correct the path, or set data.media_root.{_prepared_from(root)}",
        )
    if is_folder:
        if not path.is_dir():
            raise _no_folder(ref, "is no folder")
        return str(path)
    if not path.is_file():
        is_video_folder = ref.kind == "video" and path.is_dir()
        of_pictures = " A folder of numbered pictures is read where its record has 'folder_fps'." * is_video_folder
        raise SampleError(
            "unsupported_media",
            f"{_role(ref)} path '{_shown(ref.path)}' is not a regular file. Only {ref.kind} files can be "
            f"read.{of_pictures} Correct the path.",
        )
    _check_extension(ref, path.suffix)
    return str(path)


def _prepared_from(root: Path) -> str:
    """Advice where a set's own folder was taken for that of its media. A data set must not choose folders itself."""
    written = (read_manifest(root) or {"arguments": {}})["arguments"].get("media_root")
    if not isinstance(written, str) or Path(written) == root.resolve():
        return ""
    folder = printable(written, 200)
    return (
        f" This set was prepared with its media in '{folder}': data.media_root={folder}, or "
        f"data.media_root.NAME={folder} for the set of that name alone."
    )


def _no_folder(ref: Ref, what: str) -> SampleError:
    return SampleError(
        "unsupported_media",
        f"media path '{_shown(ref.path)}' {what}, and its record has 'folder_fps'. That is for a folder of numbered "
        "pictures below the data root. Correct the path, or leave 'folder_fps' out.",
    )


def _remote(ref: Ref, text: str) -> str:
    try:
        url = checked_url(text)
        _check_extension(ref, PurePosixPath(url_path(url)).suffix)
    except BadUrl as error:
        raise SampleError(
            "bad_url",
            f"{_role(ref)} path '{shown_url(text)}' cannot be fetched: {error}. A URL such as https://host/clip.mp4 is "
            "expected. Correct the path.",
        ) from error
    return url


def _safely(ref: Ref, query):  # type: ignore[no-untyped-def]
    """Query the file system; a path it cannot look up (too long, a NUL, a loop of links) is a missing file."""
    try:
        return query()
    except (OSError, ValueError, RuntimeError) as error:
        # errors of the file system repeat the path; a loop of links is a RuntimeError that does
        why = error if isinstance(error, ValueError) else getattr(error, "strerror", None) or "a loop of links"
        raise SampleError(
            "missing_media",
            f"{_role(ref)} path '{_shown(ref.path)}' cannot be looked up: {why}. A path to a file in the data root is "
            "expected. Correct the path.",
        ) from error


def _check_extension(ref: Ref, suffix: str) -> None:
    known, is_medium = EXTENSIONS[ref.kind], _role(ref) == "media"
    if suffix.lower() not in known:
        files, mend = (f"A {ref.kind}", "data_type") if is_medium else (ref.kind.capitalize(), "the path")
        raise SampleError(
            "unsupported_media",
            f"{_role(ref)} path '{_shown(ref.path)}' ends in '{suffix}'. {files} may end in {', '.join(known)}. "
            f"Convert the file, or correct {mend} in the record.",
        )


def _role(ref: Ref) -> str:
    """The kind of a path in messages."""
    return "media" if ref.kind in get_args(MediaKind) else ref.kind


def _shown(text: str) -> str:
    """The path for a message; of a URL in it, wherever it begins, without its secrets."""
    colon = text.find("://", len("file://") if text.startswith("file://") else 0)
    if colon < 0:
        return _short(text)
    start = len(text[:colon].rstrip(_SCHEME_CHARS))
    return _short(text[:start]) + shown_url(text[start:])


def _short(text: str, limit: int = 200) -> str:
    """A path fit for a message: printable, and cut in the middle when it is endless."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= limit else f"{shown[: limit // 2]}...{shown[-limit // 2 :]}"


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
        label = "a label is empty or longer than 63 characters, or something cannot be written in ASCII"
        why = label if isinstance(error, UnicodeError) else "a port is a number up to 65535"  # without the text itself
        raise BadUrl(f"its host, port or path is not valid ({why})") from error
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
        netloc, path = "", "/..."  # a user name and password outside of the netloc
    return printable(f"{parts.scheme}://{netloc}{path}{query}", 200)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:  # "http://[::1/x.mp4"
        raise BadUrl("it does not parse as a URL") from error
