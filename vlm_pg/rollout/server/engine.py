"""Samplers on a server: ``ServerEngine`` scores its answers for training, ``UnscoredSampler`` serves evaluations.

A server that reports log-probabilities shows by them whether it samples from the trainer's weights. Servers differ in
whether those are of the logits themselves or divided by the temperature; where the two differ, the nearer reading
counts: other weights are far from both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlm_pg.errors import AnswerError, ConfigError, SampleError, ServerError
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.contracts import Generator
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.dialects import Kind, extras
from vlm_pg.rollout.server.generator import ServerGenerator
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

RETRIED = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
LAG = Metric("rollout_lag_steps", "steps", "same")

# Clamp of d in exp(d): else one token of two models that disagree would decide everything.
LOG_RATIO_CLAMP = 20.0
# Rounding stays below, in bf16 too; see ``HEALTHY`` of training.
HEALTHY_KL = 0.01
# vLLM writes no number below; it means "unknown".
UNKNOWN_LOGPROB = -9999.0
# A mean over fewer tokens is too noisy.
ENOUGH_TOKENS = 64
# One step's mean may exceed any bound through a few odd tokens.
CALLS_TO_STOP = 2
# Kinds whose requests ask for log-probabilities.
REPORTING: tuple[Kind, ...] = ("vllm", "sglang")

ServerLogprobs = Sequence[tuple[float, ...] | None]
TrainerLogprobs = Sequence[torch.Tensor]


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
            SampleError, ServerError, InterruptedError: as ``Generator.generate``; also for a server that samples from
                another model.
        """
        found = self._generator.generate(prompts, step)
        answers = {index: group for index, group in enumerate(found) if not isinstance(group, AnswerError)}
        groups = [
            ResponseGroup(prompts[index], tuple(torch.tensor(answer.token_ids) for answer in group))
            for index, group in answers.items()
        ]
        # As in every engine, greedy responses have their log-probabilities at temperature 1.
        temperature = self.settings.temperature or 1.0
        scores = self._scorer.score(groups, temperature)
        self._weights.compare(
            [answer.logprobs for group in answers.values() for answer in group],
            [values for group in scores for values in group],
            lambda: [values for group in self._scorer.score(groups, 1.0) for values in group],
            temperature,
            step,
        )
        rollouts: list[tuple[Rollout, ...]] = [()] * len(prompts)
        for (index, answered), group, values in zip(answers.items(), groups, scores, strict=True):
            rollouts[index] = tuple(
                Rollout(tokens, logprobs, answer.finish_reason, answer.text)
                for answer, tokens, logprobs in zip(answered, group.responses, values, strict=True)
            )
        return rollouts

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        return self._generator.take_faults()

    def report(self, tally: Tally) -> None:
        """Add the number of repeated requests, the divergence of log-probabilities, and the lag of the weights."""
        found = self._weights.take()
        tally.add(RETRIED, self._generator.take_num_retried())
        if found.tokens:
            tally.add(DIVERGENCE, found.kl, found.tokens)
            tally.add(DIVERGENCE_MAX, found.largest)
        if self.lag_steps is not None:
            tally.add(LAG, self.lag_steps)


class UnscoredSampler:
    """A ``Sampler`` for evaluations: ``rollout_logprobs`` are NaN, since there are no weights here to score with.

    A prompt that this kind of generator does not support (``video_for_server``) is a fault of that question alone.
    """

    scores_itself = False

    def __init__(self, generator: Generator):
        self._generator = generator
        self._unsupported: list[BadSample] = []

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one without valid answers (``take_faults``).

        Raises:
            ServerError, InterruptedError: as ``Generator.generate``.
        """
        supported: list[int] = []
        for index, prompt in enumerate(prompts):
            try:
                self._generator.check_prompt(prompt)
                supported.append(index)
            except SampleError as error:
                fault = BadSample(prompt.sample_id, error.reason, str(error), "rollout.engine=server")
                self._unsupported.append(fault)
        groups: list[tuple[Rollout, ...]] = [()] * len(prompts)
        found = self._generator.generate([prompts[index] for index in supported], step)
        for index, answers in zip(supported, found, strict=True):
            for answer in () if isinstance(answers, AnswerError) else answers:
                unknown = torch.full((len(answer.token_ids),), torch.nan)
                groups[index] += (Rollout(torch.tensor(answer.token_ids), unknown, answer.finish_reason, answer.text),)
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


@dataclass(frozen=True)
class Divergence:
    """Sums over sampled tokens of d = trainer - server, nats: ``kl`` of exp(d) - 1 - d (the k3 estimate of
    KL(server || trainer), joschu.net/blog/kl-approx), and the ``largest`` |d|."""

    tokens: int = 0
    kl: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.tokens + other.tokens, self.kl + other.kl, max(self.largest, other.largest))

    @property
    def mean(self) -> float:
        """KL per token; 0 where nothing was compared."""
        return self.kl / self.tokens if self.tokens else 0.0


def divergence(server_logprobs: ServerLogprobs, trainer_logprobs: TrainerLogprobs) -> Divergence:
    """Of the responses whose log-probabilities the server reports; tokens at ``UNKNOWN_LOGPROB`` are left out.

    Args:
        server_logprobs: of the first tokens of each response; None: unknown.
        trainer_logprobs: fp32 [R] of each response.
    """
    pairs = [(them, us[: len(them)]) for them, us in zip(server_logprobs, trainer_logprobs, strict=True) if them]
    if not pairs:
        return Divergence()
    server = torch.cat([torch.tensor(values, dtype=torch.float64) for values, _ in pairs])
    known = server > UNKNOWN_LOGPROB
    if not known.any():
        return Divergence()
    difference = (torch.cat([values.double() for _, values in pairs]) - server)[known]
    clamped = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return Divergence(len(difference), float((torch.expm1(clamped) - clamped).sum()), float(difference.abs().max()))


class WeightsCheck:
    """Compares the log-probabilities of calls; warns of other weights, and stops at another model's.

    Args:
        url: of the server.
        log_once: prints the first line of a topic.
    """

    def __init__(self, url: str, kind: Kind, settings: RolloutSettings, log_once: Callable[[str, str], None]):
        self._url, self._kind, self._settings, self._log_once = url, kind, settings, log_once
        self._sum = Divergence()
        self._has_compared = False
        self._beyond = 0

    def take(self) -> Divergence:
        """Divergence since the last call of ``take``."""
        found, self._sum = self._sum, Divergence()
        return found

    def compare(
        self,
        server_logprobs: ServerLogprobs,
        trainer_logprobs: TrainerLogprobs,
        unscaled: Callable[[], TrainerLogprobs],
        temperature: float,
        step: int | str,
    ) -> None:
        """Compare the answers of one call.

        Args:
            server_logprobs: of each response, nats.
            trainer_logprobs: fp32 [R] of each response, at ``temperature``.
            unscaled: computes the same at temperature 1; called at other temperatures only.

        Raises:
            ServerError: ``CALLS_TO_STOP`` judged calls in a row exceeded ``max_divergence``.
        """
        # At a temperature other than 1 a comparison takes a scoring pass: only now and then, and to confirm an excess.
        every = self._settings.mismatch_every
        on_schedule = every > 0 and isinstance(step, int) and step % every == 0
        is_due = temperature == 1.0 or not self._has_compared or self._beyond > 0 or on_schedule
        if not server_logprobs or not is_due:
            return
        found = divergence(server_logprobs, trainer_logprobs)
        if not found.tokens:
            if self._kind in REPORTING:
                self._log_once(
                    "no log-probabilities",
                    f"the server at {self._url} ({self._kind}) was asked for log-probabilities and gave none that can "
                    "be compared: whether it has the trainer's weights is not checked (docs/servers.md)",
                )
            return
        self._has_compared = True
        if temperature != 1.0:
            found = min(found, divergence(server_logprobs, unscaled()), key=lambda reading: reading.kl)
        self._sum += found
        if found.tokens >= ENOUGH_TOKENS:
            self._judge(found)

    def _judge(self, found: Divergence) -> None:
        limit, changing = self._settings.server.max_divergence, extras(self._settings)
        beyond = limit is not None and found.mean > limit and not changing
        self._beyond = self._beyond + 1 if beyond else 0
        if found.mean <= HEALTHY_KL:
            return
        figures = (
            f"its log-probabilities of {found.tokens} tokens differ from the trainer's by a KL of {found.mean:.3g} "
            f"nats a token (largest difference {found.largest:.3g})"
        )
        if changing:
            names = " and ".join(f"rollout.{name}" for name in changing)
            self._log_once(
                "weights",
                f"the server at {self._url} may sample from other weights than the trainer's, or it reports "
                f"log-probabilities behind {names}, which this run sets: {figures}. The run is not stopped for it; "
                "compare once with neutral settings (docs/servers.md)",
            )
            return
        line = f"the server at {self._url} samples from other weights than the trainer's: {figures}"
        if self._beyond >= CALLS_TO_STOP:
            raise ServerError(
                f"{line}, in {self._beyond} calls running above rollout.server.max_divergence={limit:g}. Start it on "
                "the newest checkpoint of the run (on model.path before the first one) and go on with run.resume=auto."
            )
        self._log_once("weights", f"{line}; start it on the newest checkpoint now and then (docs/servers.md)")
