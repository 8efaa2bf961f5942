"""Rollouts from a server: same prompts, same settings, same interface as the engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.errors import AnswerError
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.respondent import Respondent, check_address
from vlm_pg.rollout.server.weights import WeightsCheck
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

ASKED_AGAIN = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
LAG = Metric("rollout_lag_steps", "steps", "same")


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
        check_address(settings)
        _refuse_scattered(policy)
        self.policy, self.settings = policy, settings
        self._scorer = PolicyScorer(policy, settings.prefill_tokens, should_stop)
        self._respondent = Respondent(policy, settings, seed, should_stop, messages, home, tell)
        self.server, self.stop_token_ids = self._respondent.server, self._respondent.stop_token_ids
        url = str(settings.server.url)
        self._weights = WeightsCheck(url, self.server.kind, settings, self._respondent.tell_once)
        self._served_version: int | None = None
        if self.server.loads_by_name:
            if policy.settings.lora is not None:
                raise ConfigError(
                    "rollout.engine is server with transformers serve, and model.lora is set, but that server cannot "
                    "load an adapter's checkpoint. Set model.lora=null or rollout.engine=in_process."
                )
            self.use_checkpoint(policy.model.name_or_path)
        else:
            tell(
                f"the server at {url} ({self.server.kind}) samples from the weights it was started with; training does "
                "not reach it (docs/servers.md)"
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
            self._respondent.use_checkpoint(checkpoint)
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
        found = self._respondent.ask(prompts, step)
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
        return self._respondent.take_faults()

    def report(self, tally: Tally) -> None:
        """Add what the server owed, how far its log-probabilities lay from the trainer's, how old its weights are."""
        found = self._weights.take()
        tally.add(ASKED_AGAIN, self._respondent.take_asked_again())
        if found.tokens:
            tally.add(DIVERGENCE, found.kl, found.tokens)
            tally.add(DIVERGENCE_MAX, found.largest)
        if self.lag_steps is not None:
            tally.add(LAG, self.lag_steps)


def _refuse_scattered(policy: Policy) -> None:
    if is_sharded(policy.model):
        # Scoring is a series of collectives there, and ranks have different numbers of passes.
        raise ConfigError(
            "rollout.engine is server with ZeRO stage 3, whose ranks cannot score responses at their own pace. Use "
            "stage 2 (configs/deepspeed/zero2.json) or rollout.engine=in_process."
        )
