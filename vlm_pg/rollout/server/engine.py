"""Rollouts from a server: same prompts, same settings, same interface as the engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.scattered import is_scattered
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.answers import Answer, AnswerReader, turn_token_ids
from vlm_pg.rollout.server.asking import Asker
from vlm_pg.rollout.server.client import ServerClient, all_of
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
from vlm_pg.rollout.server.weights import WeightsCheck
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

ASKED_AGAIN = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
LAG = Metric("rollout_lag_steps", "steps", "same")
STOPPED = "generation was asked to stop"


class ServerEngine:
    """A ``Sampler`` that asks an OpenAI-compatible server and scores what it says with the policy.

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

    # The trainer would be compared with itself.
    scores_itself = False

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
        self._scorer = PolicyScorer(policy, settings.prefill_tokens, should_stop)
        self._should_stop, self._messages, self._home, self._tell = should_stop, messages, home, tell
        self._told: set[str] = set()
        assert settings.server.url is not None  # _check_policy has looked
        self._url = settings.server.url
        self.server, self._model = run_until_stopped(self._recognize(), should_stop, STOPPED)
        end = policy.tokenizer.eos_token_id
        others = {*stop_token_ids(policy), *settings.stop_token_ids} - {end}
        self.stop_token_ids = (*([] if end is None else [end]), *sorted(others))
        turns = turn_token_ids(policy.tokenizer, self.stop_token_ids)
        self._ruled_out_ids = (*policy.media_token_ids, *turns)
        reader = AnswerReader(
            policy.tokenizer,
            self.stop_token_ids,
            StopStrings(policy.tokenizer, settings.stop_strings) if settings.stop_strings else None,
            settings.max_new_tokens,
            policy.media_token_ids,
            turns,
            policy.vocab_size,
            settings.min_new_tokens,
            settings.stop_strings,
        )
        self._faults = Faults(self._url, settings.server.retries + 1)
        self._weights = WeightsCheck(self._url, self.server.kind, settings, self._tell_once)
        self._ask = Asker(self.server, settings, seed, reader, self._body, self._tell_once)
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
        """``num_generations`` rollouts of every prompt; none of one that has no usable ones (``take_faults``).

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name, that keys the seeds.

        Raises:
            SampleError: a prompt the server or the model cannot take.
            ServerError: the server is away, refuses, read another prompt, gave nothing that can be learned from
                for many questions in a row, or samples from another model.
            InterruptedError: a stop was asked for.
        """
        for prompt in prompts:
            self.policy.check_prompt(prompt)
            self.policy.check_length(prompt, self.settings.max_new_tokens)
            self._compare_positions(prompt)
        found = run_until_stopped(self._ask_all(prompts, step), self._should_stop, STOPPED)
        self._faults.add(prompts, found)
        answers = [answer for answer in found if not isinstance(answer, AnswerError)]
        asked = [prompt for prompt, answer in zip(prompts, found, strict=True) if not isinstance(answer, AnswerError)]
        groups = [
            ResponseGroup(prompt, tuple(torch.tensor(answer.token_ids) for answer in group))
            for prompt, group in zip(asked, answers, strict=True)
        ]
        # As everywhere, greedy responses have their log-probabilities at temperature 1.
        temperature = self.settings.temperature or 1.0
        scores = self._scorer.score(groups, temperature)
        self._weights.compare(
            [answer.logprobs for group in answers for answer in group],
            [values for group in scores for values in group],
            lambda: [values for group in self._scorer.score(groups, 1.0) for values in group],
            temperature,
            step,
        )
        rollouts = iter(
            tuple(
                Rollout(tokens, logprobs, answer.finish_reason, answer.text)
                for tokens, logprobs, answer in zip(group.responses, values, said, strict=True)
            )
            for group, values, said in zip(groups, scores, answers, strict=True)
        )
        return [() if isinstance(answer, AnswerError) else next(rollouts) for answer in found]

    def take_faults(self) -> list[BadSample]:
        """Questions since the last call that have no usable rollouts, and why."""
        return self._faults.take()

    def report(self, tally: Tally) -> None:
        """Add what the server owed, how far its log-probabilities lay from the trainer's, how old its weights are."""
        found, self._ask.asked_again, asked_again = self._weights.take(), 0, self._ask.asked_again
        tally.add(ASKED_AGAIN, asked_again)
        if found.tokens:
            tally.add(DIVERGENCE, found.kl, found.tokens)
            tally.add(DIVERGENCE_MAX, found.largest)
        if self.lag_steps is not None:
            tally.add(LAG, self.lag_steps)

    async def _recognize(self) -> tuple[ServerInfo, str]:
        """What the server is, and the model to ask for; empty where a checkpoint is named instead."""
        async with self._client() as client:
            server = await recognize(client)
            check_settings(server.kind, self.settings)
            self._messages.check_kind(server.kind)
            return server, "" if server.loads_by_name else server.check_model(self.settings.server.model)

    async def _ask_all(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        async with self._client() as client:
            return await all_of(self._ask(client, prompt, step) for prompt in prompts)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        kind = self.server.kind
        return {
            "model": self._model,
            "messages": self._messages(prompt, kind),
            **request_fields(kind, self.settings, self.stop_token_ids, self._ruled_out_ids),
            **media_fields(kind, bool(prompt.media_kinds)),
        }

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
        return ServerClient(self.settings.server, self._tell, self._tell_once)

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
    if is_scattered(policy.model):
        # Scoring is a series of collectives there, and ranks have different numbers of passes.
        raise ConfigError(
            "rollout.engine is server with ZeRO stage 3, whose ranks cannot score responses at their own pace. Use "
            "stage 2 (configs/deepspeed/zero2.json) or rollout.engine=in_process."
        )
