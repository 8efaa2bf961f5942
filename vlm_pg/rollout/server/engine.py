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
from vlm_pg.rollout.server.answers import Answer, AnswerReader
from vlm_pg.rollout.server.client import ServerClient, run_until_stopped
from vlm_pg.rollout.server.dialects import ServerInfo, check_settings, media_fields, recognize, request_fields
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.server.messages import ChatMessages, check_prompt_echo
from vlm_pg.rollout.server.scoring import score
from vlm_pg.rollout.server.served import served_folder
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.types import Prompt, ResponseGroup, Rollout

# Whole numbers up to here survive every JSON reader.
SEED_BITS = 53


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
        ConfigError: no URL, or weights that are scattered over ranks.
        ServerError: no answer, no OpenAI-compatible server, another model, or a setting the server cannot follow.
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
        self.server = run_until_stopped(self._recognize(), should_stop)
        check_settings(self.server.kind, settings)
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
            self._model = ""
            self.use_checkpoint(policy.model.name_or_path)
        else:
            self._model = self.server.check_model(settings.server.model)
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
            SampleError: a prompt the server or the model cannot take, media tokens in a response.
            ServerError: the server is away, refuses, or read another prompt.
            InterruptedError: a stop was asked for.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
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

    async def _recognize(self) -> ServerInfo:
        async with self._client() as client:
            return await recognize(client)

    async def _ask_all(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer]]:
        async with self._client() as client:
            return await asyncio.gather(*(self._ask(client, prompt, step) for prompt in prompts))

    async def _ask(self, client: ServerClient, prompt: Prompt, step: int | str) -> list[Answer]:
        """All rollouts of one prompt, with one request or one each; what a server gives too few of is topped up."""
        wanted = self.settings.num_generations
        body = self._body(prompt)
        answers: list[Answer] = []
        if self._takes_n and wanted > 1:
            answers = await self._request(client, prompt, step, body, 0, wanted)
            if len(answers) < wanted:
                self._takes_n = False
                self._tell_once(
                    "n",
                    f"the server at {client.url} gave {len(answers)} of {wanted} choices: from now on every rollout is "
                    "a request of its own",
                )
        singles = (self._request(client, prompt, step, body, g, 1) for g in range(len(answers), wanted))
        return answers + [answer for part in await asyncio.gather(*singles) for answer in part]

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        kind = self.server.kind
        return {
            "model": self._model,
            "messages": self._messages(prompt, kind),
            **request_fields(kind, self.settings, self.stop_token_ids, self.policy.media_token_ids),
            **media_fields(kind, bool(prompt.media_kinds)),
        }

    async def _request(
        self, client: ServerClient, prompt: Prompt, step: int | str, body: dict[str, Any], index: int, count: int
    ) -> list[Answer]:
        key = rollout_key(self.seed, step, prompt.sample_id, index)
        extra = {"seed": key % 2**SEED_BITS} | ({"n": count} if count > 1 else {})
        answer = await client.post("/chat/completions", body | extra)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= count:
            raise ServerError(
                f"{client.url}/chat/completions gave {answer!r:.300} for {count} choices; expected is a list of them. "
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

    def _client(self) -> ServerClient:
        return ServerClient(self.settings.server, self._tell)

    def _tell_once(self, topic: str, line: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            self._tell(line)


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
