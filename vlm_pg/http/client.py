"""Requests to one server, and the same again: what the sampling server and the judge have in common.

A request that timed out, broke off or met a server at fault is sent again with growing pauses, or with the pause that
the server asks for. An answer has to be whole within a time and a size. No text that leaves the client shows the key.
Redirects are not followed; connections are kept, and proxies taken from the environment, by httpx2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from vlm_pg.http.bodies import ACCEPTED, bound_body
from vlm_pg.http.keys import without_key
from vlm_pg.http.outcomes import retry_after

T = TypeVar("T")
Outcome = httpx2.Response | httpx2.RequestError

STOP_POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

# The request itself is at fault: no repetition helps.
HOPELESS = (
    httpx2.InvalidURL,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
    UnicodeError,  # host names
)


class Client:
    """Requests inside one event loop; an async context manager.

    Args:
        key: sent as bearer token; None or "" for none.
        timeout_seconds: for a whole answer; ``connect_seconds`` of them for a connection.
        connections: at a time.
        most_mb: MiB of an answer, unpacked; ``setting`` names where that is said.
    """

    def __init__(
        self,
        key: str | None,
        timeout_seconds: float,
        connect_seconds: float,
        connections: int,
        most_mb: float,
        setting: str = "",
    ):
        async def bound(response: httpx2.Response) -> None:
            bound_body(response, int(most_mb * 2**20), setting)

        self.key, self._timeout_seconds = key, timeout_seconds
        self._http = httpx2.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(timeout_seconds, connect=connect_seconds),
            limits=httpx2.Limits(max_connections=connections),
            event_hooks={"response": [bound]},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def without_key(self, text: str) -> str:
        """``text`` as it may be shown and recorded."""
        return without_key(text, self.key)

    async def pause(self, attempt: int, least_seconds: float = 0.0) -> None:
        """Before the ``attempt``-th time, from 1 on, that an answer is asked for again."""
        seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 60), LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(max(seconds, least_seconds))

    def asked_pause(self, outcome: Outcome, longest_seconds: float) -> float:
        """Seconds the server asks to be left alone (Retry-After)."""
        if not isinstance(outcome, httpx2.Response):
            return 0.0
        return min(retry_after(outcome.headers.get("retry-after", "")), longest_seconds)

    async def answered(
        self,
        send: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, httpx2.Response]],
        retries: int,
        is_final: Callable[[Outcome, int], bool],
        was_away: Callable[[Outcome], Awaitable[bool]] | None = None,
    ) -> Outcome:
        """What a request came to, sent again up to ``retries`` times.

        Args:
            is_final: told the outcome and the tries left, whether it is what was asked for, or as good as it gets.
            was_away: whether the server was away and has been waited for, which costs no try.

        Raises:
            HOPELESS: the request cannot be sent, or its answer not be read.
        """
        attempt = 0
        while True:
            try:
                outcome: Outcome = await self._sent(send)
            except HOPELESS:
                raise
            except httpx2.RequestError as error:
                outcome = error
            if is_final(outcome, retries - attempt):
                return outcome
            if was_away is not None and await was_away(outcome):
                continue
            if attempt == retries:
                return outcome
            attempt += 1
            await self.pause(attempt, self.asked_pause(outcome, LONGEST_PAUSE_SECONDS))

    async def _sent(
        self, send: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, httpx2.Response]]
    ) -> httpx2.Response:
        """The whole answer within ``timeout_seconds``, however little of it comes at a time."""
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                return await send(self._http)
        except TimeoutError:
            if not limit.expired():
                raise
            raise httpx2.ReadTimeout("the answer was not whole by then") from None


def run_until_stopped(work: Coroutine[Any, Any, T], should_stop: Callable[[], bool] | None, stopped: str) -> T:
    """Run ``work`` in an event loop of its own.

    Raises:
        InterruptedError: ``should_stop`` said so, with ``stopped`` as its words; connections are closed then.
    """

    async def watched() -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=None if should_stop is None else STOP_POLL_SECONDS)
            if not task.done() and should_stop is not None and should_stop():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise InterruptedError(stopped)
        return task.result()

    return asyncio.run(watched())
