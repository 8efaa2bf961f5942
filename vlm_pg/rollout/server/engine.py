"""Rollouts from a server: same prompts, same settings, same interface as the engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.rollout.sampling import rollout_key
from vlm_pg.rollout.scoring import score
from vlm_pg.rollout.server.answers import Answer, AnswerReader
from vlm_pg.rollout.server.client import ServerClient, all_of, run_until_stopped
from vlm_pg.rollout.server.dialects import (
    POSITION_RULES,
    ServerInfo,
    check_settings,
    maybe_ignored,
    media_fields,
    recognize,
    request_fields,
)
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.server.messages import ChatMessages, check_prompt_echo
from vlm_pg.rollout.server.served import served_folder
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.types import Prompt, ResponseGroup, Rollout

# Whole numbers up to here survive every JSON reader.
SEED_BITS = 53
# Short answers are often equal, and so say nothing about how they were drawn.
LONGEST_EQUAL_TOKENS = 8


class ServerEngine:
    """Asks an OpenAI-compatible server for rollouts and scores them with the policy.

    ``rollout_logprobs`` are those of the policy as it is when it scores, not of the weights the server has;
    ``sampling_logprobs`` and ``entropies`` are not known. The server is asked what it is when the engine is made.

    Args:
        policy: scores the responses.
        settings: how to sample, and where; ``settings.server.url`` must be set.
        seed: the run's seed; that of a request depends on (seed, step, sample id, rollout index).
        should_stop: asked several times a second; True raises InterruptedError.
        messages: prompts as chat messages.
        home: folder, visible to the server, in which checkpoints are laid out for ``transformers serve``.
        tell: shows one line to people.

    Raises:
        ConfigError: no URL, a key that cannot be sent, or weights that are scattered over ranks.
        ServerError: no answer, no OpenAI-compatible server, another model, or settings or samples that this kind of
            server cannot be given.
    """

    def __init__(
        self,
        policy: Policy,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool],
        messages: ChatMessages,
        home: Path,
        tell: Callable[[str], None],
    ):
        _check_policy(policy, settings)
        self.policy, self.settings, self.seed = policy, settings, seed
        self._should_stop, self._messages, self._home, self._tell = should_stop, messages, home, tell
        self._told: set[str] = set()
        self.server, self._model = run_until_stopped(self._recognize(), should_stop)
        end = policy.tokenizer.eos_token_id
        others = {*stop_token_ids(policy), *settings.stop_token_ids} - {end}
        self.stop_token_ids = (*([] if end is None else [end]), *sorted(others))
        self._reader = AnswerReader(
            policy.tokenizer,
            self.stop_token_ids,
            StopStrings(policy.tokenizer, settings.stop_strings) if settings.stop_strings else None,
            settings.max_new_tokens,
            policy.media_token_ids,
        )
        self._takes_n = self.server.takes_n
        self._served_version: int | None = None
        if self.server.loads_by_name:
            if policy.settings.lora is not None:
                raise ConfigError(
                    "rollout.engine is server with transformers serve, and model.lora is set, but that server cannot "
                    "load an adapter's checkpoint. Set model.lora=null or rollout.engine=in_process."
                )
            self.use_checkpoint(policy.model.name_or_path)
        else:
            ignored = maybe_ignored(self.server.kind, settings)
            if ignored:
                tell(
                    f"the server at {settings.server.url} is of unknown kind and may ignore {', '.join(ignored)}, "
                    "which is not neutral (docs/servers.md)"
                )
            tell(
                f"the server at {settings.server.url} ({self.server.kind}) samples from the weights it was started "
                "with; training does not reach it (docs/servers.md)"
            )

    @property
    def lag_steps(self) -> int | None:
        """Updates the policy has had since the weights the server samples from; None where that is not known."""
        return None if self._served_version is None else self.policy.weights_version - self._served_version

    def use_checkpoint(self, checkpoint: str | Path) -> None:
        """Sample from this checkpoint, of the policy as it is now, from the next request on.

        Only ``transformers serve`` can change weights by name; other servers keep theirs.
        """
        if self.server.loads_by_name:
            self._model = str(served_folder(str(checkpoint), self._home))
            self._served_version = self.policy.weights_version

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt.

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name, that keys the seeds.

        Raises:
            SampleError: a prompt the server or the model cannot take.
            ServerError: the server is away, refuses, read another prompt, or gave what cannot be learned from.
            InterruptedError: a stop was asked for.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
            self._compare_positions(prompt)
        answers = run_until_stopped(self._ask_all(prompts, step), self._should_stop)
        groups = [
            ResponseGroup(prompt, tuple(torch.tensor(answer.token_ids) for answer in group))
            for prompt, group in zip(prompts, answers, strict=True)
        ]
        # As everywhere, greedy responses have their log-probabilities at temperature 1.
        temperature = self.settings.temperature or 1.0
        scores = score(self.policy, groups, temperature, self.settings.prefill_tokens, self._should_stop)
        return [
            tuple(
                Rollout(tokens, logprobs, answer.finish_reason, answer.text)
                for tokens, logprobs, answer in zip(group.responses, values, said, strict=True)
            )
            for group, values, said in zip(groups, scores, answers, strict=True)
        ]

    async def _recognize(self) -> tuple[ServerInfo, str]:
        """What the server is, and the model to ask for; empty where a checkpoint is named instead."""
        async with self._client() as client:
            server = await recognize(client)
            check_settings(server.kind, self.settings)
            self._messages.check_kind(server.kind)
            return server, "" if server.loads_by_name else server.check_model(self.settings.server.model)

    async def _ask_all(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer]]:
        async with self._client() as client:
            return await all_of(self._ask(client, prompt, step) for prompt in prompts)

    async def _ask(self, client: ServerClient, prompt: Prompt, step: int | str) -> list[Answer]:
        """All rollouts of one prompt, with one request or one each; what a server gives too few of is topped up."""
        wanted = self.settings.num_generations
        body = _Lazy(lambda: self._body(prompt))
        answers: list[Answer] = []
        asked_at_once = self._takes_n and wanted > 1
        if asked_at_once:
            answers = await self._request(client, prompt, step, body, 0, wanted)
            if len(answers) < wanted:
                self._takes_n = False
                self._tell_once(
                    "n",
                    f"the server at {client.url} gave {len(answers)} of {wanted} choices: from now on every rollout is "
                    "a request of its own",
                )
        singles = (self._request(client, prompt, step, body, g, 1) for g in range(len(answers), wanted))
        answers += [answer for part in await all_of(singles) for answer in part]
        self._check_different(client, prompt, answers, asked_at_once)
        return answers

    def _check_different(
        self, client: ServerClient, prompt: Prompt, answers: Sequence[Answer], asked_at_once: bool
    ) -> None:
        """Long answers that are all alike come from one seed for all of them, or of a policy that knows but one."""
        first = answers[0].token_ids
        if len(answers) < 2 or len(first) <= LONGEST_EQUAL_TOKENS or self.settings.temperature == 0.0:
            return
        if any(answer.token_ids != first for answer in answers):
            return
        line = f"all {len(answers)} responses to sample {prompt.sample_id!r} of the server at {client.url} are equal"
        if asked_at_once and self.server.kind == "openai":
            self._takes_n = False
            self._tell_once("equal at once", f"{line}: from now on every rollout is a request of its own")
        else:
            self._tell_once("equal", f"{line}; if that happens often, it ignores the temperature or the seeds")

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        kind = self.server.kind
        return {
            "model": self._model,
            "messages": self._messages(prompt, kind),
            **request_fields(kind, self.settings, self.stop_token_ids, self.policy.media_token_ids),
            **media_fields(kind, bool(prompt.media_kinds)),
        }

    async def _request(
        self, client: ServerClient, prompt: Prompt, step: int | str, body: _Lazy, index: int, count: int
    ) -> list[Answer]:
        key = rollout_key(self.seed, step, prompt.sample_id, index)
        extra = {"seed": key % 2**SEED_BITS} | ({"n": count} if count > 1 else {})

        async def whole() -> dict[str, Any]:
            return await body.made() | extra

        answer = await client.post("/chat/completions", whole)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= count:
            raise ServerError(
                f"POST /chat/completions gave {client.excerpt(repr(answer))} for {count} choices; expected is a list "
                "of them. "
                "rollout.server.url must be the base URL of an OpenAI-compatible server."
            )
        check_prompt_echo(prompt, answer)
        answers = [self._reader.read(prompt.sample_id, choice) for choice in choices]
        self._compare_lengths(prompt, answers, (answer.get("usage") or {}).get("completion_tokens"))
        return answers

    def _compare_lengths(self, prompt: Prompt, answers: Sequence[Answer], sampled: int | None) -> None:
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

    def _compare_positions(self, prompt: Prompt) -> None:
        """Tell, once, if the server reads a prompt at other positions than those it is trained at."""
        ours, theirs = self.policy.settings.positions, POSITION_RULES.get(self.server.kind)
        if theirs is None or theirs == ours or not prompt.media_kinds:
            return
        if not torch.equal(self._messages.served_positions(prompt, theirs), prompt.positions_3P):
            self._tell_once(
                "positions",
                f"the server at {self.settings.server.url} ({self.server.kind}) counts rotary positions by the rule "
                f"{theirs}, this run by {ours}: sample {prompt.sample_id!r} is sampled at other positions than it is "
                f"trained at. Set model.positions={theirs}, or rollout.engine=in_process (docs/servers.md)",
            )

    def _client(self) -> ServerClient:
        return ServerClient(self.settings.server, self._tell)

    def _tell_once(self, topic: str, line: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            self._tell(line)


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


def _check_policy(policy: Policy, settings: RolloutSettings) -> None:
    if settings.server.url is None:
        raise ConfigError(
            "rollout.engine is server and rollout.server.url is not set. Give the base URL with its version, for "
            "example rollout.server.url=http://127.0.0.1:8000/v1."
        )
    if any(hasattr(parameter, "ds_id") for parameter in policy.model.parameters()):
        # Scoring is a series of collectives there, and ranks have different numbers of passes.
        raise ConfigError(
            "rollout.engine is server with ZeRO stage 3, whose ranks cannot score responses at their own pace. Use "
            "stage 2 (configs/deepspeed/zero2.json) or rollout.engine=in_process."
        )
