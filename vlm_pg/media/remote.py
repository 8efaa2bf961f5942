"""Downloading a media file, when the user allowed remote media: bounded in size and silence, http and https only."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from vlm_pg.errors import SampleError
from vlm_pg.media.settings import MediaSettings

SCHEMES = ("http", "https")
CHUNK_BYTES = 1 << 20


class _SameSchemes(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only (urllib would follow ftp as well)."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if urlsplit(newurl).scheme not in SCHEMES:
            raise urllib.error.URLError(f"redirected to '{newurl}', which is neither http nor https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, folder: Path, settings: MediaSettings) -> Path:
    """Fetch ``url`` into ``folder`` and return the file.

    Raises:
        SampleError: ``download_failed``, or ``download_too_large`` beyond ``max_remote_bytes``.
    """
    target = folder / ("download" + PurePosixPath(urlsplit(url).path).suffix.lower())
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _SameSchemes(),
    ):
        opener.add_handler(handler)
    try:
        with opener.open(url, timeout=settings.remote_timeout_seconds) as response, target.open("wb") as file:
            stated = response.headers.get("Content-Length", "")
            _check_size(url, int(stated) if stated.isdigit() else 0, settings.max_remote_bytes)
            received = 0
            while chunk := response.read(CHUNK_BYTES):
                received += len(chunk)
                _check_size(url, received, settings.max_remote_bytes)
                file.write(chunk)
            if stated.isdigit() and received != int(stated):
                raise http.client.IncompleteRead(b"", int(stated) - received)
    except (OSError, http.client.HTTPException) as error:  # URLError, HTTPError and timeouts are OSErrors
        raise SampleError(
            "download_failed",
            f"'{url}' could not be downloaded: {error}. A server that answers within "
            f"{settings.remote_timeout_seconds:g} s is needed. Try again later, or download the "
            "file and give its path.",
        ) from error
    return target


def _check_size(url: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise SampleError(
            "download_too_large",
            f"'{url}' is larger than {limit_bytes} bytes, the most that is downloaded. Use a smaller file, or raise "
            "media.max_remote_bytes.",
        )
