"""Answers of an OpenAI-compatible server to prompts: requested, retried until they are valid, and validated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import torch

from vlm_pg.errors import AnswerError, ConfigError, ServerError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.http.keys import holds_key
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.contracts import Answer
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.rollout.sampling import StopStrings, rollout_key
from vlm_pg.rollout.server.answers import AnswerReader, Begun, Completion, Interrupted, parse_part, turn_token_ids
from vlm_pg.rollout.server.client import RUN_GOES_ON, ServerClient, gather_or_cancel
from vlm_pg.rollout.server.dialects import (
    POSITION_RULES,
    VLLM_CPU_HEAD_SIZES,
    ServerInfo,
    cache_counts,
    check_settings,
    recognize,
    request_fields,
    tokens_in,
)
from vlm_pg.rollout.server.messages import ChatMessages, check_prompt_echo
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import BadSample, Prompt

STOPPED = "generation was asked to stop"
# Integers up to here survive every JSON reader.
SEED_BITS = 53
# Short answers are often equal by chance.
LONGEST_EQUAL_TOKENS = 8
# Reason in bad_samples.jsonl of a question without a valid answer.
UNUSABLE = "server_answer"
# A resumed run repeats the seeds, so a single question must not end it; so many in a row are the server's fault.
MOST_IN_A_ROW = 8
# Of a response, for each update that it may be old: loading weights is tried again.
INTERRUPTIONS = 4


class ServerGenerator:
    """A ``Generator`` on a server; needs no weights. The server's kind is queried when this is made.

    Args:
        model: makes the prompts, and defines which tokens end a response and which are not allowed in one.
        settings: of sampling, and of the server; ``settings.server.url`` must be set.
        seed: the run's; a request's depends on (seed, step, sample id, rollout index), and on the retry.
        should_stop: polled; True raises InterruptedError.
        messages: prompts as chat messages.
        log: prints one line.
        advice: a sentence for errors: how to continue once the server works.
        server: the server's kind, if it has been queried before.
        needs_logprobs: an answer without the log-probability of every token is invalid.

    Raises:
        ConfigError: no URL, or a key that cannot be sent.
        ServerError: no answer, no OpenAI-compatible server, another model, or settings or samples that this kind of
            server does not support.
    """

    def __init__(
        self,
        model: Policy | WeightlessPolicy,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool],
        messages: ChatMessages,
        log: Callable[[str], None],
        advice: str = RUN_GOES_ON,
        server: ServerInfo | None = None,
        needs_logprobs: bool = False,
    ):
        self.settings, self.policy, self._seed = settings, model, seed
        self.messages, self._log = messages, log
        self._should_stop, self._advice = should_stop, advice
        self._logged: set[str] = set()
        self.server = server or query_server(settings, should_stop, log, advice)
        kind = self.server.kind
        check_settings(kind, settings)
        messages.check_kind(kind)
        self.model_name = self.server.check_model(settings.server.model)
        end = model.tokenizer.eos_token_id
        others = {*stop_token_ids(model), *settings.stop_token_ids} - {end}
        self.stop_token_ids = (*([] if end is None else [end]), *sorted(others))
        turns = turn_token_ids(model.tokenizer, self.stop_token_ids)
        # What every request contains about sampling.
        self.fields = request_fields(kind, settings, self.stop_token_ids, (*model.media_token_ids, *turns))
        self._reader = AnswerReader(
            model.tokenizer,
            self.stop_token_ids,
            StopStrings(model.tokenizer, settings.stop_strings) if settings.stop_strings else None,
            settings.max_new_tokens,
            model.media_token_ids,
            turns,
            model.vocab_size,
            settings.min_new_tokens,
            needs_logprobs,
        )
        # Whether one request still samples all rollouts of a group; and what the last answer said of its prompt.
        self.takes_n, self.prompt_echo = self.server.takes_n, ""
        self._num_retried = self._invalid_in_a_row = 0
        self._cache_counts = Counter[str]()
        ignored = [f"rollout.{name}" for name in settings.extras] if kind == "openai" else []
        if ignored:
            log(
                f"the server at {settings.server.url} is of unknown kind and may ignore {', '.join(ignored)}, "
                "which is not neutral (docs/servers.md)"
            )
        head_size = model.family.head_shape(model.model.config)[2]
        if kind == "vllm" and head_size not in VLLM_CPU_HEAD_SIZES:
            log(
                f"the server at {settings.server.url} is vLLM, and this model has a head size of {head_size}; on a CPU "
                f"vLLM supports {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}, and its engine ends at the first request "
                "of a model with another one (docs/servers.md)"
            )

    def generate(
        self, prompts: Sequence[Prompt], step: int | str, count: int | None = None
    ) -> list[list[Answer] | AnswerError]:
        """As in ``Generator``; ServerError also for a server that refuses, or read another prompt.

        ``count``: of answers to every prompt, instead of ``num_generations``.

        Questions are divided evenly over several servers. All requests of one go to the same server, which has then
        encoded its media and read its prompt.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
            self._compare_positions(prompt)

        urls = self.settings.server.urls
        # Ranks begin at different servers.
        start = rollout_key(self._seed, step, prompts[0].sample_id, 0) if prompts else 0
        url_of = [urls[(start + number) % len(urls)] for number in range(len(prompts))]

        async def all_groups() -> list[list[Answer] | AnswerError]:
            async with AsyncExitStack() as stack:
                clients = {
                    url: await stack.enter_async_context(
                        ServerClient(
                            self.settings.server.of_url(url),
                            self._log,
                            self.log_once,
                            self._advice,
                            takes_aborts=self.settings.interrupts,
                        )
                    )
                    for url in sorted(set(url_of))
                }
                return await gather_or_cancel(
                    self._group(clients[url], prompt, step, count or self.settings.num_generations)
                    for prompt, url in zip(prompts, url_of, strict=True)
                )

        found = run_until_stopped(all_groups(), self._should_stop, STOPPED)
        for url, answer in zip(url_of, found, strict=True):
            if not isinstance(answer, AnswerError):
                self._invalid_in_a_row = 0
                continue
            self._invalid_in_a_row += 1
            if self._invalid_in_a_row >= MOST_IN_A_ROW:
                # The count begins anew for a caller that catches this and retries.
                count, self._invalid_in_a_row = self._invalid_in_a_row, 0
                raise ServerError(
                    f"The server at {url} gave no usable answer to {count} questions in a row, each of which was "
                    f"sent up to {self.settings.server.retries + 1} times. The last error: {answer} Put the server "
                    f"right. {self._advice}"
                )
        return found

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise SampleError for a prompt that the model, or this kind of server, does not support."""
        self.policy.check_length(prompt, self.settings.max_new_tokens)
        self.messages.check_video(prompt)

    def take_num_retried(self) -> int:
        """Number of invalid answers that were requested again since the last call."""
        self._num_retried, count = 0, self._num_retried
        return count

    def take_cache_counts(self) -> Counter[str]:
        """``cache_counts`` of all servers since the last call; empty for other kinds than vLLM."""
        if self.server.kind != "vllm":
            return Counter()

        async def query(url: str) -> Counter[str]:
            settings = self.settings.server.of_url(url)
            async with ServerClient(settings, self._log, self.log_once, self._advice) as client:
                return await cache_counts(client)

        counts = Counter[str]()
        for url in self.settings.server.urls:
            counts.update(run_until_stopped(query(url), self._should_stop, STOPPED))
        # A server that was started again counts from 0.
        new, self._cache_counts = counts - self._cache_counts, counts
        return new

    def log_once(self, topic: str, line: str) -> None:
        """Log the first line of a topic."""
        if topic not in self._logged:
            self._logged.add(topic)
            self._log(line)

    async def _group(
        self, client: ServerClient, prompt: Prompt, step: int | str, count: int
    ) -> list[Answer] | AnswerError:
        """All rollouts of one prompt, with one request or one each; missing choices are requested singly.

        Invalid answers are requested again; the error of one that stays invalid is the result.
        """
        attempts = range(self.settings.server.retries + 1)
        lock, made = asyncio.Lock(), dict[str, Any]()

        async def body() -> dict[str, Any]:
            """Of all requests, made in a thread when the first of them is sent."""
            async with lock:
                if not made:
                    made.update(await asyncio.to_thread(self._body, prompt))
            return made

        async def request(
            attempt: int, index: int, count: int, begun: Begun | None = None
        ) -> list[Answer | AnswerError]:
            """Choices under the attempt's own seeds."""
            if attempt and begun is None:
                self._num_retried += 1
                await client.pause(attempt)
            key = f"{step}/again-{attempt}" if attempt else step
            return await self._request(client, prompt, key, body, index, count, begun or Begun())

        async def whole(attempt: int, index: int, result: Answer | AnswerError | None) -> Answer | AnswerError:
            """One response, from ``result`` on, that loading weights may interrupt."""
            if result is None:
                (result,) = await request(attempt, index, 1)
            for _ in range(INTERRUPTIONS * self.settings.staleness):
                if not isinstance(result, Interrupted):
                    break
                begun = result.begun if self.settings.in_flight == "continue" else Begun()
                (result,) = await request(attempt, index, 1, begun)
            return result

        async def all_choices() -> list[Answer | AnswerError]:
            for attempt in attempts:
                try:
                    return await request(attempt, 0, count)
                except AnswerError as error:
                    last = error
            raise last

        async def single(index: int, result: Answer | AnswerError | None) -> Answer:
            if isinstance(result, Interrupted):
                result = await whole(0, index, result)
            for attempt in attempts if result is None else attempts[1:]:
                if isinstance(result, Answer):
                    break
                try:
                    result = await whole(attempt, index, None)
                except AnswerError as error:
                    result = error
            if isinstance(result, Answer):
                return result
            assert result is not None
            raise result

        at_once = self.takes_n and count > 1
        given: list[Answer | AnswerError | None] = [None] * count
        try:
            if at_once:
                first = await all_choices()
                given[: len(first)] = first
                if len(first) < count:
                    self.takes_n = False
                    self.log_once(
                        "n",
                        f"the server at {client.url} gave {len(first)} of {count} choices: from now on every rollout "
                        "is a request of its own",
                    )
            answers = await gather_or_cancel(single(index, given[index]) for index in range(count))
        except AnswerError as error:
            return AnswerError(f"Server {client.url}: {client.without_key(str(error))}", client.url)
        self._check_different(client, prompt, answers, at_once)
        return answers

    async def _request(
        self,
        client: ServerClient,
        prompt: Prompt,
        step: int | str,
        body: Callable[[], Awaitable[dict[str, Any]]],
        index: int,
        count: int,
        begun: Begun,
    ) -> list[Answer | AnswerError]:
        by_token, num_begun = self.settings.interrupts, len(begun.token_ids)
        # A response that goes on does not repeat the random numbers it began with.
        key = rollout_key(self._seed, f"{step}/{num_begun}" if num_begun else step, prompt.sample_id, index)
        extra = {"seed": key % 2**SEED_BITS} | ({"n": count} if count > 1 else {})

        async def make_body() -> dict[str, Any]:
            made = await body()
            if not by_token:
                return made | extra
            least, most = self.settings.min_new_tokens - num_begun, self.settings.max_new_tokens - num_begun
            sampling = made["sampling_params"] | extra | {"max_tokens": most, "min_tokens": max(0, least)}
            return made | {"token_ids": [*made["token_ids"], *begun.token_ids], "sampling_params": sampling}

        url = f"{client.root}/inference/v1/generate" if by_token else f"{client.url}/chat/completions"
        response = await client.post(url, make_body)
        choices = response.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= count:
            raise AnswerError(
                f"POST /chat/completions gave {client.excerpt(repr(response))} for {count} choices; expected is a list "
                "of them. rollout.server.url must be the base URL of an OpenAI-compatible server."
            )
        name = f"Sample {prompt.sample_id!r}: the answer to POST /chat/completions"
        completion = parse_part(Completion, response, name)
        if num_begun:
            ids = list(response.get("prompt_token_ids") or ())
            response = response | {"prompt_token_ids": ids[:-num_begun], "usage": {}}
        self.prompt_echo = check_prompt_echo(prompt, response)
        found: list[Answer | AnswerError] = []
        indices: set[int] = set()
        for choice in completion.choices:
            try:
                answer = self._reader.read_tokens(choice, begun) if by_token else self._reader.read(choice)
                if holds_key(answer.text, client.key):
                    raise AnswerError("a response repeats the API key of the request.")
                if (given := choice.get("index")) in indices:
                    raise AnswerError(f"two choices of one answer have index {given}.")
                found.append(answer)
                if given is not None:
                    indices.add(given)
            except Interrupted as error:
                found.append(error)
            except AnswerError as error:
                found.append(AnswerError(f"Sample {prompt.sample_id!r}: {error}"))
        self._compare_lengths(prompt, found, completion.usage.completion_tokens)
        return found

    def _compare_lengths(self, prompt: Prompt, found: Sequence[Answer | AnswerError], sampled: int | None) -> None:
        """Log where the text of responses has another number of tokens than the server sampled."""
        answers = [answer for answer in found if isinstance(answer, Answer)]
        if len(answers) < len(found) or sampled is None or all(answer.exact for answer in answers):
            return
        read = sum(answer.num_read for answer in answers)
        # Some servers count the stop token and some do not.
        if not read - len(answers) <= sampled <= read:
            self.log_once(
                "tokens",
                f"a response of sample {prompt.sample_id!r} has {sampled} tokens at the server and {read} when its "
                "text is tokenized again; such responses are trained on as tokenized here (docs/servers.md)",
            )

    def _check_different(self, client: ServerClient, prompt: Prompt, answers: Sequence[Answer], at_once: bool) -> None:
        """Long answers that are all equal share one seed, or the policy has collapsed."""
        first = answers[0].token_ids
        if len(answers) < 2 or len(first) <= LONGEST_EQUAL_TOKENS or self.settings.temperature == 0.0:
            return
        if any(answer.token_ids != first for answer in answers):
            return
        line = f"all {len(answers)} responses to sample {prompt.sample_id!r} of the server at {client.url} are equal"
        if at_once and self.server.kind == "openai":
            self.takes_n = False
            self.log_once("equal at once", f"{line}: from now on every rollout is a request of its own")
        else:
            self.log_once("equal", f"{line}; if that happens often, it ignores the temperature or the seeds")

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        kind = self.server.kind
        if self.settings.interrupts:
            ids = self.policy.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
            return {"model": self.model_name, **tokens_in(self.messages(prompt, kind), ids, self.fields)}
        return {
            "model": self.model_name,
            "messages": self.messages(prompt, kind),
            **self.fields,
            **self.messages.fields,
        }

    def _compare_positions(self, prompt: Prompt) -> None:
        """Log, once, if the server computes other rotary positions of a prompt than this process."""
        ours, theirs = self.policy.settings.positions, POSITION_RULES.get(self.server.kind)
        if theirs is None or theirs == ours or not prompt.media_kinds:
            return
        if not torch.equal(self.messages.served_positions(prompt, theirs), prompt.positions_3P):
            self.log_once(
                "positions",
                f"the server at {self.settings.server.url} ({self.server.kind}) counts rotary positions by the rule "
                f"{theirs}, this run by {ours}: sample {prompt.sample_id!r} is sampled at other positions than it is "
                f"trained at. Set model.positions={theirs}, or rollout.engine=in_process (docs/servers.md)",
            )


def bad_samples(prompts: Sequence[Prompt], found: Sequence[list[Answer] | AnswerError]) -> list[BadSample]:
    """Questions without a valid answer, and why."""
    return [
        BadSample(prompt.sample_id, UNUSABLE, str(error), error.url)
        for prompt, error in zip(prompts, found, strict=True)
        if isinstance(error, AnswerError)
    ]


def query_server(
    settings: RolloutSettings, should_stop: Callable[[], bool], log: Callable[[str], None], advice: str = RUN_GOES_ON
) -> ServerInfo:
    """Kind and models of the servers of ``settings.server``; one that is away is waited for.

    Raises:
        ConfigError: no URL, or a key that cannot be sent.
        ServerError: no answer, no OpenAI-compatible server, or several that differ.
    """
    if settings.server.url is None:
        raise ConfigError(
            "rollout.engine is server and rollout.server.url is not set. Give the base URL with its version, for "
            "example rollout.server.url=http://127.0.0.1:8000/v1."
        )

    async def query(url: str) -> ServerInfo:
        async with ServerClient(settings.server.of_url(url), log, lambda topic, line: log(line), advice) as client:
            return await recognize(client)

    first, *others = [run_until_stopped(query(url), should_stop, STOPPED) for url in settings.server.urls]
    for url, other in zip(settings.server.urls[1:], others, strict=True):
        if (other.kind, other.models) != (first.kind, first.models):
            raise ServerError(
                f"The servers differ: {settings.server.url} ({first.kind}) serves "
                f"{', '.join(map(first.shown, first.models))}, {url} ({other.kind}) "
                f"{', '.join(map(other.shown, other.models))}. Start all servers of a run alike."
            )
    return replace(first, paths=first.paths.intersection(*(other.paths for other in others)))
