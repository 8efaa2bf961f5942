"""HTTP to one server: repeated requests, waiting for a server that is away, and stopping on request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from vlm_pg.http.client import HOPELESS, Client, Outcome
from vlm_pg.http.keys import read_key
from vlm_pg.http.outcomes import AWAY, failed, json_of, may_be_away, text_of
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.settings import ServerSettings

T = TypeVar("T")

RUN_GOES_ON = "run.resume=auto goes on from the last checkpoint, and samples an interrupted step again."

PROBE_TIMEOUT_SECONDS = 5.0
PROBE_EVERY_SECONDS = 1.0
SHOWN_CHARACTERS = 300
# A longer pause that a server asks for is told of: nothing else is seen of the run meanwhile.
TOLD_PAUSE_SECONDS = 5.0


class ServerClient(Client):
    """Requests to one server inside one event loop; an async context manager.

    A ServerError that leaves it names the URL, and shows no key.

    Args:
        settings: ``url`` must be set.
        tell: shows one line to people.
        tell_once: shows a line of a topic, the first time.
        goes_on: a sentence for errors: how to go on once the server is right.

    Raises:
        ConfigError: a key that cannot be sent.
    """

    def __init__(
        self,
        settings: ServerSettings,
        tell: Callable[[str], None],
        tell_once: Callable[[str, str], None],
        goes_on: str = RUN_GOES_ON,
    ):
        assert settings.url is not None
        self._goes_on = goes_on
        self._settings, self._tell, self._tell_once = settings, tell, tell_once
        self.url = settings.url.rstrip("/")
        super().__init__(
            read_key("rollout.server", settings.api_key_variable),
            settings.timeout_seconds,
            min(PROBE_TIMEOUT_SECONDS, settings.timeout_seconds),
            settings.concurrency + 1,
            settings.max_answer_mb,
            "rollout.server.max_answer_mb",
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._waiting = asyncio.Lock()
        self._absent_seconds = 0.0
        self._back_at = float("-inf")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if isinstance(error, ServerError):
            # A server may repeat the key in what it answers.
            raise ServerError(f"Server {self.url}: {self.without_key(str(error))}") from error.__cause__

    async def get(self, address: str) -> httpx2.Response:
        """The answer of any status; a server that is away is waited for.

        Raises:
            ServerError: it stayed away for ``wait_seconds``.
        """
        return await self._answered(lambda http: http.get(address))

    async def post(self, path: str, make_body: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """The JSON answer to a request.

        Args:
            path: after the base URL.
            make_body: called when it is this request's turn, so that no more than ``concurrency`` bodies wait.

        Raises:
            ServerError: refused (4xx), failed ``retries`` times more or gave no JSON object so often, or the server
                stayed away.
        """
        async with self._slots:
            body = await make_body()
            # In a thread: a body of many pictures would keep all other requests, and a stop, waiting.
            data = await asyncio.to_thread(lambda: json.dumps(body, allow_nan=False).encode())
            headers = {"Content-Type": "application/json"}
            response = await self._answered(
                lambda http: http.post(f"{self.url}{path}", content=data, headers=headers), wants_json=True
            )
        if failed(response):
            raise ServerError(
                f"It failed {self._settings.retries + 1} times at POST {path}, {self._shown(response)} Its log says "
                f"why. {self._goes_on}"
            )
        if response.status_code != 200:
            raise ServerError(
                f"It refused POST {path}, {self._shown(response)} Change the rollout setting it names, or use a server "
                "that knows it (docs/servers.md)."
            )
        self._absent_seconds = 0.0
        return self.json_object(response)

    def json_object(self, response: httpx2.Response) -> dict[str, Any]:
        """The answer's JSON object; ServerError for anything else."""
        value = json_of(response)
        if not isinstance(value, dict):
            raise ServerError(
                f"{response.request.url} gave no JSON object, {self._shown(response)} rollout.server.url must be the "
                "base URL of an OpenAI-compatible server with its version, for example http://127.0.0.1:8000/v1."
            )
        return value

    def excerpt(self, text: str) -> str:
        """The beginning of what the server said, on one line and without the key."""
        # Before space is joined and after it: a key may hold some.
        words = self.without_key(" ".join(self.without_key(text[: 100 * SHOWN_CHARACTERS]).split()))
        return words[:SHOWN_CHARACTERS] + (" ..." if len(words) > SHOWN_CHARACTERS else "")

    def _shown(self, response: httpx2.Response) -> str:
        return f"status {response.status_code}: {self.excerpt(text_of(response))!r}."

    def _named(self, error: Exception) -> str:
        return self.without_key(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    async def _answered(
        self, send: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, httpx2.Response]], wants_json: bool = False
    ) -> httpx2.Response:
        """Sent again after time-outs, broken connections and failures of the server.

        ``wants_json``: a good status is not enough without an object.
        """

        def is_final(outcome: Outcome, tries_left: int) -> bool:
            if not isinstance(outcome, httpx2.Response) or failed(outcome):
                return False
            garbled = wants_json and outcome.status_code == 200 and not isinstance(json_of(outcome), dict)
            return not garbled or not tries_left

        async def was_away(outcome: Outcome) -> bool:
            return may_be_away(outcome) and await self._was_away()

        try:
            outcome = await self.answered(send, self._settings.retries, is_final, was_away)
        except HOPELESS as error:
            raise ServerError(
                f"The request cannot be sent, or its answer not be read ({type(error).__name__}). Check "
                "rollout.server.url, and proxies set in the environment."
            ) from None
        if isinstance(outcome, httpx2.Response):
            return outcome
        raise ServerError(
            f"It broke off {self._settings.retries + 1} times, last with {self._named(outcome)}. Look at its "
            "log; a slow one needs a longer rollout.server.timeout_seconds "
            f"({self._settings.timeout_seconds:g} now). {self._goes_on}"
        ) from outcome

    def asked_pause(self, outcome: Outcome, longest_seconds: float) -> float:
        """Never longer than a server that is away is waited for; a long one is told of."""
        seconds = super().asked_pause(outcome, max(longest_seconds, self._settings.wait_seconds))
        if seconds > TOLD_PAUSE_SECONDS and isinstance(outcome, httpx2.Response):
            self._tell_once(
                "pause",
                f"the server at {self.url} asks for a pause (status {outcome.status_code}, Retry-After): waiting "
                f"{seconds:.0f} s, and again without a line whenever it asks",
            )
        return seconds

    async def _was_away(self) -> bool:
        """Wait until the server answers; False if it does so at once.

        Absences add up until a request is answered: one that takes the server down with it is not sent for ever.
        """
        failed_at = time.monotonic()
        wait = self._settings.wait_seconds
        async with self._waiting:  # one request asks for all of them
            if self._back_at > failed_at:
                return True
            since, told = time.monotonic(), False
            while (failure := await self._probe()) is not None:
                if self._absent_seconds + time.monotonic() - since >= wait:
                    raise ServerError(
                        f"It has not answered for {wait:g} s ({failure}). Nothing is lost: start it again. "
                        f"{self._goes_on} rollout.server.wait_seconds says how long to wait."
                    )
                if not told:
                    self._tell(f"the server at {self.url} does not answer ({failure}); waiting up to {wait:g} s")
                    told = True
                await asyncio.sleep(PROBE_EVERY_SECONDS)
            if told:
                self._back_at = time.monotonic()
                self._absent_seconds += self._back_at - since
                self._tell(f"the server at {self.url} answers again")
            return told

    async def _probe(self) -> str | None:
        """Why the server is away; None if it is not."""
        try:
            async with asyncio.timeout(2 * PROBE_TIMEOUT_SECONDS):
                response = await self._http.get(f"{self.url}/models", timeout=PROBE_TIMEOUT_SECONDS)
        except (httpx2.RequestError, TimeoutError) as error:
            return self._named(error)
        return f"status {response.status_code}" if response.status_code in AWAY else None


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error ends what still runs."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
