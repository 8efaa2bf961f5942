"""Downloading a media file, when the user allowed remote media: bounded in size and silence, http and https only."""

from __future__ import annotations

import http.client
import tempfile
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from vlm_pg.errors import SampleError, printable
from vlm_pg.media.boundary import trace_of
from vlm_pg.media.connections import opener
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.urls import BadUrl, checked_url, shown_url

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
        except Exception as error:  # whatever a server answers is no fault of the program
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
    """Refuse answers whose bytes are not the file's, in order and all of them."""
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
