"""Asking a server for the rollouts of one question until all of them fit, or one never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from vlm_pg.http.keys import holds_key
from vlm_pg.rollout.sampling import rollout_key
from vlm_pg.rollout.server.answers import Answer, AnswerReader
from vlm_pg.rollout.server.client import ServerClient, all_of
from vlm_pg.rollout.server.dialects import ServerInfo
from vlm_pg.rollout.server.errors import AnswerError
from vlm_pg.rollout.server.messages import check_prompt_echo
from vlm_pg.rollout.server.schema import Completion, read_part
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt

# Whole numbers up to here survive every JSON reader.
SEED_BITS = 53
# Short answers are often equal, and so say nothing about how they were drawn.
LONGEST_EQUAL_TOKENS = 8


class Asker:
    """Requests for rollouts, and what comes back read and checked.

    Args:
        seed: the run's seed; that of a request depends on (seed, step, sample id, rollout index), and on how often an
            answer did not fit.
        make_body: what a prompt's requests have in common.
        tell_once: shows a line of a topic, the first time.
    """

    def __init__(
        self,
        server: ServerInfo,
        settings: RolloutSettings,
        seed: int,
        reader: AnswerReader,
        make_body: Callable[[Prompt], dict[str, Any]],
        tell_once: Callable[[str, str], None],
    ):
        self._server, self._settings, self._seed, self._reader = server, settings, seed, reader
        self._make_body, self._tell_once = make_body, tell_once
        self._takes_n = server.takes_n
        self.asked_again = 0

    async def __call__(self, client: ServerClient, prompt: Prompt, step: int | str) -> list[Answer] | AnswerError:
        """All rollouts of one prompt, with one request or one each; what a server gives too few of is topped up.

        Answers that do not fit are asked for again; the error of one that never does is the result.
        """
        wanted = self._settings.num_generations
        body = _Lazy(lambda: self._make_body(prompt))
        asked_at_once = self._takes_n and wanted > 1
        given: list[Answer | AnswerError | None] = [None] * wanted
        try:
            if asked_at_once:
                first = await self._group(client, prompt, step, body)
                given[: len(first)] = first
                if len(first) < wanted:
                    self._takes_n = False
                    self._tell_once(
                        "n",
                        f"the server at {client.url} gave {len(first)} of {wanted} choices: from now on every rollout "
                        "is a request of its own",
                    )
            answers = await all_of(self._single(client, prompt, step, body, g, given[g]) for g in range(wanted))
        except AnswerError as error:
            return AnswerError(f"Server {client.url}: {client.without_key(str(error))}")
        self._check_different(client, prompt, answers, asked_at_once)
        return answers

    async def _group(
        self, client: ServerClient, prompt: Prompt, step: int | str, body: _Lazy
    ) -> list[Answer | AnswerError]:
        for attempt in range(self._settings.server.retries + 1):
            try:
                name = await self._begin(client, step, attempt)
                return await self._request(client, prompt, name, body, 0, self._settings.num_generations)
            except AnswerError as error:
                last = error
        raise last

    async def _single(
        self,
        client: ServerClient,
        prompt: Prompt,
        step: int | str,
        body: _Lazy,
        index: int,
        given: Answer | AnswerError | None,
    ) -> Answer:
        """The rollout that was given, or one that is asked for: under another seed after one that did not fit."""
        result = given
        for attempt in range(0 if given is None else 1, self._settings.server.retries + 1):
            if isinstance(result, Answer):
                break
            try:
                name = await self._begin(client, step, attempt)
                (result,) = await self._request(client, prompt, name, body, index, 1)
            except AnswerError as error:
                result = error
        if isinstance(result, Answer):
            return result
        assert result is not None
        raise result

    async def _begin(self, client: ServerClient, step: int | str, attempt: int) -> int | str:
        """What keys the seeds of an attempt, after the pause before it."""
        if not attempt:
            return step
        self.asked_again += 1
        await client.pause(attempt)
        return f"{step}/again-{attempt}"

    def _check_different(
        self, client: ServerClient, prompt: Prompt, answers: Sequence[Answer], asked_at_once: bool
    ) -> None:
        """Long answers that are all alike come from one seed for all of them, or of a policy that knows but one."""
        first = answers[0].token_ids
        if len(answers) < 2 or len(first) <= LONGEST_EQUAL_TOKENS or self._settings.temperature == 0.0:
            return
        if any(answer.token_ids != first for answer in answers):
            return
        line = f"all {len(answers)} responses to sample {prompt.sample_id!r} of the server at {client.url} are equal"
        if asked_at_once and self._server.kind == "openai":
            self._takes_n = False
            self._tell_once("equal at once", f"{line}: from now on every rollout is a request of its own")
        else:
            self._tell_once("equal", f"{line}; if that happens often, it ignores the temperature or the seeds")

    async def _request(
        self, client: ServerClient, prompt: Prompt, step: int | str, body: _Lazy, index: int, count: int
    ) -> list[Answer | AnswerError]:
        key = rollout_key(self._seed, step, prompt.sample_id, index)
        extra = {"seed": key % 2**SEED_BITS} | ({"n": count} if count > 1 else {})

        async def whole() -> dict[str, Any]:
            return await body.made() | extra

        answer = await client.post("/chat/completions", whole)
        completion = self._completion(client, prompt, answer, count)
        check_prompt_echo(prompt, answer)
        found = self._read_choices(prompt, completion.choices, client.key)
        self._compare_lengths(prompt, found, completion.usage.completion_tokens)
        return found

    def _completion(self, client: ServerClient, prompt: Prompt, answer: dict[str, Any], count: int) -> Completion:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= count:
            raise AnswerError(
                f"POST /chat/completions gave {client.excerpt(repr(answer))} for {count} choices; expected is a list "
                "of them. "
                "rollout.server.url must be the base URL of an OpenAI-compatible server."
            )
        return read_part(Completion, answer, f"Sample {prompt.sample_id!r}: the answer to POST /chat/completions")

    def _read_choices(self, prompt: Prompt, choices: Sequence[Any], key: str | None) -> list[Answer | AnswerError]:
        found: list[Answer | AnswerError] = []
        places: set[int] = set()
        for choice in choices:
            try:
                answer = self._reader.read(prompt.sample_id, choice)
                if holds_key(answer.text, key):
                    raise AnswerError(f"Sample {prompt.sample_id!r}: a response repeats the API key of the request.")
            except AnswerError as error:
                found.append(error)
                continue
            place = choice.get("index")
            again = place is not None and place in places
            places.add(-1 if place is None else place)
            twice = AnswerError(f"Sample {prompt.sample_id!r}: two choices of one answer have index {place}.")
            found.append(twice if again else answer)
        return found

    def _compare_lengths(self, prompt: Prompt, found: Sequence[Answer | AnswerError], sampled: int | None) -> None:
        answers = [answer for answer in found if isinstance(answer, Answer)]
        if len(answers) < len(found):
            return
        read = sum(answer.num_read for answer in answers)
        if sampled is None or all(answer.exact for answer in answers):
            return
        # Some servers count the stop token and some do not.
        if not read - len(answers) <= sampled <= read:
            self._tell_once(
                "tokens",
                f"a response of sample {prompt.sample_id!r} has {sampled} tokens at the server and {read} when its "
                "text is tokenized again; such responses are trained on as tokenized here (docs/servers.md)",
            )


class _Lazy:
    """The body of a prompt's requests, made in a thread when the first of them has its turn."""

    def __init__(self, make: Callable[[], dict[str, Any]]):
        self._make, self._lock = make, asyncio.Lock()
        self._body: dict[str, Any] | None = None

    async def made(self) -> dict[str, Any]:
        async with self._lock:
            if self._body is None:
                self._body = await asyncio.to_thread(self._make)
        return self._body
