"""The ``openai`` client with bounds: shared by the sampling server and the judges.

The package sends single requests (URLs, key, connections, proxies of the environment). Here are the limits on the size
of a response and the time until it is complete, and the retries: which failures are repeated depends on the body. A
redirect is a response like any other, so the key never travels to another host.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2
import openai

from vlm_pg.http.keys import without_key

T = TypeVar("T")
Outcome = httpx2.Response | httpx2.RequestError

STOP_POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
# zlib's window size that accepts a gzip or a zlib header.
_GZIP_OR_ZLIB = 47
_COMPRESSED, _PLAIN = ("gzip", "x-gzip", "deflate"), ("", "identity")
# The request itself is invalid: no retry helps. Host names raise UnicodeError.
INVALID_REQUEST = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, UnicodeError)
# Statuses of a proxy, or of a server that is still loading.
UNAVAILABLE = (502, 503, 504)


class UnreadableResponse(httpx2.TransportError):
    """A body beyond the size limit, or not encoded as its header says. A retry may succeed."""


class BoundedBody(httpx2.AsyncByteStream):
    """A response body of at most ``limit_bytes`` once it is decompressed, so that no bomb fills the memory.

    ``encoding``: the Content-Encoding header. ``setting``: name of the limit in messages. Reading it raises
    UnreadableResponse: the body exceeds the limit, or is compressed otherwise than requested, twice, or damaged.
    """

    def __init__(self, stream: Any, encoding: str, limit_bytes: int, setting: str = ""):
        self._stream, self._encoding, self._limit_bytes = stream, encoding.strip().lower(), limit_bytes
        self._setting = f" ({setting})" if setting else ""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._encoding not in (*_PLAIN, *_COMPRESSED):
            raise UnreadableResponse(f"the response is encoded as {self._encoding[:40]!r}; gzip was requested")
        decompressor = zlib.decompressobj(_GZIP_OR_ZLIB) if self._encoding in _COMPRESSED else None
        received = size = 0
        async for data in self._stream:
            received += len(data)
            try:
                piece = data if decompressor is None else decompressor.decompress(data, self._limit_bytes + 1 - size)
            except zlib.error as error:
                raise UnreadableResponse(f"the response cannot be decompressed ({error})") from None
            size += len(piece)
            if max(received, size) > self._limit_bytes:
                raise UnreadableResponse(f"the response has more than {self._limit_bytes / 2**20:g} MiB{self._setting}")
            yield piece
        if decompressor is not None and received and not decompressor.eof:
            raise UnreadableResponse("the compressed response is incomplete")

    async def aclose(self) -> None:
        await self._stream.aclose()


class Client:
    """Requests inside one event loop; an async context manager.

    Args:
        key: sent as bearer token; None or "" for none.
        timeout_seconds: until a response is complete; ``connect_seconds`` of them for a connection.
        connections: open at a time.
        max_mb: MiB of a response, decompressed; ``setting`` is the name of that limit in messages.
    """

    def __init__(
        self,
        key: str | None,
        timeout_seconds: float,
        connect_seconds: float,
        connections: int,
        max_mb: float,
        setting: str = "",
    ):
        async def bound(response: httpx2.Response) -> None:
            encoding = response.headers.pop("content-encoding", "")  # else httpx decompresses a second time
            response.stream = BoundedBody(response.stream, encoding, int(max_mb * 2**20), setting)
            # Read as UTF-8 whatever charset is named: some that Python knows are no encodings of text.
            response.headers["content-type"] = "application/json"

        self.key, self._timeout_seconds = key, timeout_seconds
        # Neither a missing key nor OpenAI's own variables of the environment are sent.
        omitted = ("OpenAI-Organization", "OpenAI-Project", *(() if key else ("Authorization",)))
        self._headers: dict[str, Any] = {"Accept-Encoding": "gzip"} | dict.fromkeys(omitted, openai.Omit())
        self._openai = openai.AsyncOpenAI(
            api_key=key or "none",
            # Unused: requests name complete URLs, so that an invalid one fails as a request.
            base_url="http://localhost",
            max_retries=0,
            timeout=httpx2.Timeout(timeout_seconds, connect=connect_seconds),
            http_client=httpx2.AsyncClient(
                verify=_tls(), limits=httpx2.Limits(max_connections=connections), event_hooks={"response": [bound]}
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()

    def without_key(self, text: str) -> str:
        """``text`` with the key masked, fit for logs and files."""
        return without_key(text, self.key)

    async def pause(self, attempt: int, least_seconds: float = 0.0) -> None:
        """Sleep before retry number ``attempt`` (from 1), longer each time."""
        seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 60), LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(max(seconds, least_seconds))

    def retry_pause(self, outcome: Outcome, longest_seconds: float) -> float:
        """Seconds to pause before a retry at least, as the server requests (Retry-After)."""
        return min(retry_after_seconds(outcome), longest_seconds)

    async def request(
        self,
        url: str,
        data: bytes | None,
        retries: int,
        should_retry: Callable[[Outcome], bool],
        wait_until_back: Callable[[Outcome], Awaitable[bool]] | None = None,
    ) -> Outcome:
        """The outcome of a POST of JSON ``data``, of a GET without data, retried up to ``retries`` times.

        Args:
            url: complete, with scheme and host.
            wait_until_back: True if the server was away and has been waited for, which costs no retry.

        Raises:
            INVALID_REQUEST: the request cannot be sent, or its response not be read.
        """
        attempt = 0
        while True:
            outcome = await self.attempt(url, data)
            if isinstance(outcome, INVALID_REQUEST):
                raise outcome
            if not should_retry(outcome):
                return outcome
            if wait_until_back is not None and await wait_until_back(outcome):
                continue
            if attempt == retries:
                return outcome
            attempt += 1
            await self.pause(attempt, self.retry_pause(outcome, LONGEST_PAUSE_SECONDS))

    async def attempt(self, url: str, data: bytes | None = None, timeout_seconds: float | None = None) -> Outcome:
        """One request; the response is complete within the timeout, however slowly its bytes arrive."""
        limit = asyncio.timeout(timeout_seconds or self._timeout_seconds)
        try:
            async with limit:
                if data is None:
                    return await self._openai.get(url, cast_to=httpx2.Response, options={"headers": self._headers})
                headers = self._headers | {"Content-Type": "application/json"}
                return await self._openai.post(url, content=data, cast_to=httpx2.Response, options={"headers": headers})
        except openai.APIStatusError as error:
            return error.response
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.RequestError):
                return error.__cause__
            return httpx2.TransportError(str(error.__cause__))
        except TimeoutError:
            if not limit.expired():
                raise
            return httpx2.ReadTimeout("the response was not complete by then")


@cache
def _tls() -> ssl.SSLContext:
    """Shared by all clients: reading the certificates takes 0.1 s."""
    return httpx2.create_ssl_context()


def retry_after_seconds(outcome: Outcome) -> float:
    """Of the Retry-After header, which holds seconds or a date; 0 for anything else, or without a response."""
    value = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx2.Response) else ""
    with suppress(ValueError, OverflowError):
        seconds = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
        return max(0.0, seconds)
    return 0.0


def may_be_away(outcome: Outcome) -> bool:
    """Whether the server may be down; one that accepts a connection and stays silent is slow, not down."""
    if isinstance(outcome, httpx2.Response):
        return outcome.status_code in UNAVAILABLE
    if isinstance(outcome, UnreadableResponse | httpx2.DecodingError):
        return False
    return not isinstance(outcome, httpx2.TimeoutException) or isinstance(outcome, httpx2.ConnectTimeout)


def json_of(response: httpx2.Response) -> Any:
    """The body as JSON; None where it is not JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def run_until_stopped(work: Coroutine[Any, Any, T], should_stop: Callable[[], bool] | None, message: str) -> T:
    """Run ``work`` in an event loop of its own.

    Raises:
        InterruptedError: with ``message``, after ``should_stop`` (polled), which cancels the work.
    """

    async def watched() -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=None if should_stop is None else STOP_POLL_SECONDS)
            if not task.done() and should_stop is not None and should_stop():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise InterruptedError(message)
        return task.result()

    return asyncio.run(watched())
