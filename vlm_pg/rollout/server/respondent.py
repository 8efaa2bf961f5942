"""One server and its model: what it is, which weights a request names, and its answers to prompts, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.rollout.server.answers import Answer, AnswerReader, turn_token_ids
from vlm_pg.rollout.server.asking import Asker
from vlm_pg.rollout.server.client import RUN_GOES_ON, ServerClient, all_of
from vlm_pg.rollout.server.dialects import (
    POSITION_RULES,
    ServerInfo,
    check_settings,
    maybe_ignored,
    media_fields,
    recognize,
    request_fields,
)
from vlm_pg.rollout.server.errors import AnswerError
from vlm_pg.rollout.server.faults import Faults
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.served import served_folder
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.types import BadSample, Prompt

STOPPED = "generation was asked to stop"


class Respondent:
    """Asks an OpenAI-compatible server; nothing here needs weights. The server is asked what it is at once.

    Args:
        model: makes the prompts, and says what ends a response and what may not be in one.
        settings: how to sample, and where; ``settings.server.url`` must be set.
        seed: that of a request depends on (seed, step, sample id, rollout index).
        should_stop: asked several times a second; True raises InterruptedError.
        messages: prompts as chat messages.
        home: folder, visible to the server, in which checkpoints are laid out for ``transformers serve``.
        tell: shows one line to people.
        goes_on: a sentence for errors: how to go on once the server is right.
        server: what the server is, where it has been asked before.

    Raises:
        ConfigError: no URL, or a key that cannot be sent.
        ServerError: no answer, no OpenAI-compatible server, another model, or settings or samples that this kind of
            server cannot be given.
    """

    def __init__(
        self,
        model: Policy | WeightlessPolicy,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool],
        messages: ChatMessages,
        home: Path,
        tell: Callable[[str], None],
        goes_on: str = RUN_GOES_ON,
        server: ServerInfo | None = None,
    ):
        check_address(settings)
        self.settings, self.policy = settings, model
        self.messages, self._home, self._tell = messages, home, tell
        self._should_stop, self._goes_on = should_stop, goes_on
        self._told: set[str] = set()
        assert settings.server.url is not None  # check_address has looked
        self._url = settings.server.url
        self.server = server or ask_what_it_is(settings, should_stop, tell, goes_on)
        check_settings(self.server.kind, settings)
        messages.check_kind(self.server.kind)
        # Empty where a checkpoint is named instead.
        self.model_name = "" if self.server.loads_by_name else self.server.check_model(settings.server.model)
        end = model.tokenizer.eos_token_id
        others = {*stop_token_ids(model), *settings.stop_token_ids} - {end}
        self.stop_token_ids = (*([] if end is None else [end]), *sorted(others))
        turns = turn_token_ids(model.tokenizer, self.stop_token_ids)
        self._ruled_out_ids = (*model.media_token_ids, *turns)
        reader = AnswerReader(
            model.tokenizer,
            self.stop_token_ids,
            StopStrings(model.tokenizer, settings.stop_strings) if settings.stop_strings else None,
            settings.max_new_tokens,
            model.media_token_ids,
            turns,
            model.vocab_size,
            settings.min_new_tokens,
            settings.stop_strings,
        )
        self._faults = Faults(self._url, settings.server.retries + 1, goes_on)
        self._ask = Asker(self.server, settings, seed, reader, self._body, self.tell_once)
        ignored = maybe_ignored(self.server.kind, settings)
        if ignored:
            tell(
                f"the server at {settings.server.url} is of unknown kind and may ignore {', '.join(ignored)}, "
                "which is not neutral (docs/servers.md)"
            )

    @property
    def fields(self) -> dict[str, Any]:
        """What every request says of sampling."""
        return request_fields(self.server.kind, self.settings, self.stop_token_ids, self._ruled_out_ids)

    def use_checkpoint(self, checkpoint: str | Path) -> None:
        """From the next request on name this checkpoint; only for a server that ``loads_by_name``."""
        self.model_name = str(served_folder(str(checkpoint), self._home))

    def ask(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        """``num_generations`` answers to every prompt, or why there are none (then also ``take_faults``).

        Raises:
            SampleError: a prompt the server or the model cannot take.
            ServerError: the server is away, refuses, read another prompt, or gave nothing that fits for many questions
                in a row.
            InterruptedError: a stop was asked for.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
            self._compare_positions(prompt)
        found = run_until_stopped(self._ask_all(prompts, step), self._should_stop, STOPPED)
        self._faults.add(prompts, found)
        return found

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise SampleError for a prompt that the model, or this kind of server, cannot be given as it is."""
        self.policy.check_length(prompt, self.settings.max_new_tokens)
        self.messages.check_video(prompt)

    def take_faults(self) -> list[BadSample]:
        """Questions since the last call that have no usable answers, and why."""
        return self._faults.take()

    def take_asked_again(self) -> int:
        """How many answers since the last call did not fit and were asked for again."""
        self._ask.asked_again, count = 0, self._ask.asked_again
        return count

    async def _ask_all(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        async with ServerClient(self.settings.server, self._tell, self.tell_once, self._goes_on) as client:
            return await all_of(self._ask(client, prompt, step) for prompt in prompts)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        kind = self.server.kind
        return {
            "model": self.model_name,
            "messages": self.messages(prompt, kind),
            **self.fields,
            **media_fields(kind, bool(prompt.media_kinds)),
            **self.messages.fields,
        }

    def _compare_positions(self, prompt: Prompt) -> None:
        """Tell, once, if the server reads a prompt at other positions than this process would."""
        ours, theirs = self.policy.settings.positions, POSITION_RULES.get(self.server.kind)
        if theirs is None or theirs == ours or not prompt.media_kinds:
            return
        if not torch.equal(self.messages.served_positions(prompt, theirs), prompt.positions_3P):
            self.tell_once(
                "positions",
                f"the server at {self.settings.server.url} ({self.server.kind}) counts rotary positions by the rule "
                f"{theirs}, this run by {ours}: sample {prompt.sample_id!r} is sampled at other positions than it is "
                f"trained at. Set model.positions={theirs}, or rollout.engine=in_process (docs/servers.md)",
            )

    def tell_once(self, topic: str, line: str) -> None:
        """Show the line, if none of its topic has been shown."""
        if topic not in self._told:
            self._told.add(topic)
            self._tell(line)


def check_address(settings: RolloutSettings) -> None:
    """Raise ConfigError where no server is named."""
    if settings.server.url is None:
        raise ConfigError(
            "rollout.engine is server and rollout.server.url is not set. Give the base URL with its version, for "
            "example rollout.server.url=http://127.0.0.1:8000/v1."
        )


def ask_what_it_is(
    settings: RolloutSettings, should_stop: Callable[[], bool], tell: Callable[[str], None], goes_on: str = RUN_GOES_ON
) -> ServerInfo:
    """What the server at ``settings.server.url`` is; one that is away is waited for.

    Raises:
        ConfigError: no URL, or a key that cannot be sent.
        ServerError: no answer, or no OpenAI-compatible server.
    """
    check_address(settings)

    async def asked() -> ServerInfo:
        async with ServerClient(settings.server, tell, lambda topic, line: tell(line), goes_on) as client:
            return await recognize(client)

    return run_until_stopped(asked(), should_stop, STOPPED)
