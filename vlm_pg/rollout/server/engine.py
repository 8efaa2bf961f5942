"""Samplers on a server: ``ServerEngine`` scores its answers for training, ``UnscoredSampler`` serves evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vlm_pg.errors import AnswerError, ConfigError, SampleError
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.generator import ServerGenerator
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.weights import WeightsCheck
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

ASKED_AGAIN = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
LAG = Metric("rollout_lag_steps", "steps", "same")


class ServerEngine:
    """A ``Sampler`` on an OpenAI-compatible server, whose responses the policy scores.

    ``rollout_logprobs`` are those of the policy at the time of scoring, not of the server's weights;
    ``sampling_logprobs`` and ``entropies`` are unknown. The server's kind is queried when the engine is made.

    Args:
        policy: scores the responses.
        settings, seed, should_stop, messages, home, log: as in ``ServerGenerator``.

    Raises:
        ConfigError, ServerError: as ``ServerGenerator``; also for weights that are scattered over ranks.
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
        log: Callable[[str], None],
    ):
        if is_sharded(policy.model):
            # Scoring is a series of collectives there, and ranks have different numbers of passes.
            raise ConfigError(
                "rollout.engine is server with ZeRO stage 3, whose ranks cannot score responses at their own pace. Use "
                "stage 2 (configs/deepspeed/zero2.json) or rollout.engine=in_process."
            )
        self.policy, self.settings = policy, settings
        self._scorer = PolicyScorer(policy, settings.prefill_tokens, should_stop)
        self._generator = ServerGenerator(policy, settings, seed, should_stop, messages, home, log)
        self.server, self.stop_token_ids = self._generator.server, self._generator.stop_token_ids
        url = str(settings.server.url)
        self._weights = WeightsCheck(url, self.server.kind, settings, self._generator.log_once)
        self._served_version: int | None = None
        if self.server.loads_by_name:
            if policy.settings.lora is not None:
                raise ConfigError(
                    "rollout.engine is server with transformers serve, and model.lora is set, but that server cannot "
                    "load an adapter's checkpoint. Set model.lora=null or rollout.engine=in_process."
                )
            self.use_checkpoint(policy.model.name_or_path)
        else:
            log(
                f"the server at {url} ({self.server.kind}) samples from the weights it was started with; training does "
                "not reach it (docs/servers.md)"
            )

    @property
    def lag_steps(self) -> int | None:
        """Updates of the policy since the weights that the server samples from; None where those are unknown."""
        return None if self._served_version is None else self.policy.weights_version - self._served_version

    def use_checkpoint(self, checkpoint: str | Path) -> None:
        """Sample from this checkpoint of the current policy from the next request on.

        Only ``transformers serve`` can change weights by name; other servers keep theirs.
        """
        if self.server.loads_by_name:
            self._generator.use_checkpoint(checkpoint)
            self._served_version = self.policy.weights_version

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one without valid answers (``take_faults``).

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name, that keys the seeds.

        Raises:
            SampleError, ServerError, InterruptedError: as ``ServerGenerator.generate``; also for a server that samples
                from another model.
        """
        found = self._generator.generate(prompts, step)
        answers = [answer for answer in found if not isinstance(answer, AnswerError)]
        answered = [prompt for prompt, given in zip(prompts, found, strict=True) if not isinstance(given, AnswerError)]
        groups = [
            ResponseGroup(prompt, tuple(torch.tensor(answer.token_ids) for answer in group))
            for prompt, group in zip(answered, answers, strict=True)
        ]
        # As in every engine, greedy responses have their log-probabilities at temperature 1.
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
                for tokens, logprobs, answer in zip(group.responses, values, given, strict=True)
            )
            for group, values, given in zip(groups, scores, answers, strict=True)
        )
        return [() if isinstance(answer, AnswerError) else next(rollouts) for answer in found]

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        return self._generator.take_faults()

    def report(self, tally: Tally) -> None:
        """Add the number of repeated requests, the divergence of log-probabilities, and the lag of the weights."""
        found = self._weights.take()
        tally.add(ASKED_AGAIN, self._generator.take_asked_again())
        if found.tokens:
            tally.add(DIVERGENCE, found.kl, found.tokens)
            tally.add(DIVERGENCE_MAX, found.largest)
        if self.lag_steps is not None:
            tally.add(LAG, self.lag_steps)


class UnscoredSampler:
    """A ``Sampler`` for evaluations: ``rollout_logprobs`` are NaN, since there are no weights here to score with.

    A prompt that this kind of server does not support (``video_for_server``) is a fault of that question alone.
    """

    scores_itself = False

    def __init__(self, generator: ServerGenerator):
        self._generator = generator
        self._unsupported: list[BadSample] = []

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one without valid answers (``take_faults``).

        Raises:
            ServerError, InterruptedError: as ``ServerGenerator.generate``.
        """
        is_supported = [self._is_supported(prompt) for prompt in prompts]
        supported = [prompt for prompt, fits in zip(prompts, is_supported, strict=True) if fits]
        found = iter(self._generator.generate(supported, step))
        groups: list[tuple[Rollout, ...]] = []
        for fits in is_supported:
            answers = next(found) if fits else []
            given = [] if isinstance(answers, AnswerError) else answers
            groups.append(
                tuple(
                    Rollout(
                        torch.tensor(answer.token_ids),
                        torch.full((len(answer.token_ids),), torch.nan),
                        answer.finish_reason,
                        answer.text,
                    )
                    for answer in given
                )
            )
        return groups

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        unsupported, self._unsupported = self._unsupported, []
        return [*unsupported, *self._generator.take_faults()]

    def report(self, tally: Tally) -> None:
        """Nothing: an evaluation counts its questions itself."""

    def use_checkpoint(self, checkpoint: Path) -> None:
        """Name this checkpoint in requests from now on; only for a server that loads by name."""
        self._generator.use_checkpoint(checkpoint)

    def _is_supported(self, prompt: Prompt) -> bool:
        try:
            self._generator.check_prompt(prompt)
        except SampleError as error:
            self._unsupported.append(BadSample(prompt.sample_id, error.reason, str(error), "rollout.engine=server"))
            return False
        return True
