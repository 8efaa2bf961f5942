"""Samplers on servers: ``ServerEngine`` keeps their weights at the policy's, for training; ``UnscoredSampler`` serves
evaluations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vlm_pg.errors import AnswerError, SampleError, ServerError
from vlm_pg.metrics import Metric
from vlm_pg.rollout.contracts import Answer, Generator
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.dialects import REPORTING
from vlm_pg.rollout.server.divergence import DivergenceCheck
from vlm_pg.rollout.server.generator import ServerGenerator, query_server
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.weights import PushedWeights, TrainedModel
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout

RETRIED = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
PROBE_DIVERGENCE = Metric("server_probe_divergence", "nat per token")
PROBE_DIVERGENCE_MAX = Metric("server_probe_divergence_max", "nat", "largest")
PREFIX_HITS = Metric("server_prefix_cache_hits", "share of prompt tokens")
MEDIA_HITS = Metric("server_media_cache_hits", "share of media")

# Of a server that is started again within one step's sampling.
RESTARTS_TO_STOP = 3


class ServerEngine:
    """A ``Sampler`` on OpenAI-compatible servers, whose responses the policy scores.

    ``rollout_logprobs`` are the server's own where it reports them as the policy defines them (of the logits divided by
    the temperature, before filters and penalties). Elsewhere they are the policy's, which a server with the policy's
    weights samples from. ``sampling_logprobs`` and ``entropies`` are unknown. The server's kind is queried when the
    engine is made.

    Args:
        model: the policy, which scores the responses, and how its weights are written.
        settings, seed, should_stop, messages, log: as in ``ServerGenerator``.
        run_folder: for the weights that servers load, if no other folder is set.

    Raises:
        ConfigError, ServerError: as ``ServerGenerator`` and ``PushedWeights``.
    """

    def __init__(
        self,
        model: TrainedModel,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool],
        messages: ChatMessages,
        run_folder: Path,
        log: Callable[[str], None],
    ):
        self.policy, self.settings, self._log = model.policy, settings, log
        self._scorer = PolicyScorer(self.policy, settings.prefill_tokens, should_stop)
        server, keeps = query_server(settings, should_stop, log), settings.server.weights == "keep"
        home = run_folder / "served"
        self._generator = ServerGenerator(
            self.policy, settings, seed, should_stop, messages, home, log, server=server, needs_logprobs=keeps
        )
        self.server, self.stop_token_ids = server, self._generator.stop_token_ids
        urls = ", ".join(settings.server.urls)
        self._check = DivergenceCheck(urls, server.kind, settings, self._generator.log_once)
        self._pushed: PushedWeights | None = None
        if not keeps:
            folder = run_folder / "weights"
            if settings.server.weights_folder is not None:
                of_run = f"{run_folder.name}-{zlib.crc32(str(run_folder.absolute()).encode()):08x}"
                folder = Path(settings.server.weights_folder) / of_run / "weights"
            self._pushed = PushedWeights(model, settings, server, seed, should_stop, folder, log)
        else:
            log(
                f"rollout.server.weights=keep: the server at {urls} ({server.kind}) samples from the weights it was "
                "started with; training does not reach it (docs/servers.md)"
            )

    @property
    def scores_itself(self) -> bool:
        return self.server.kind in REPORTING

    def sync_weights(self) -> None:
        """Bring the policy's present weights to the servers; with ``rollout.server.weights=keep`` nothing.

        Raises:
            ServerError, OSError, InterruptedError: as ``PushedWeights.sync``.
        """
        if self._pushed is None:
            return
        self._pushed.sync()
        if self.server.loads_by_name:
            self._generator.use_checkpoint(self._pushed.path)
        elif self._pushed.adapter is not None:
            self._generator.model_name = self._pushed.adapter

    def release_memory(self) -> None:
        """Let the servers sleep, with ``rollout.server.sleep``.

        Raises:
            ServerError: a server does not.
        """
        if self._pushed is not None:
            self._pushed.sleep()

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one without valid answers (``take_faults``).

        Responses of a server that lost its weights while it sampled are sampled again.

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name, that keys the seeds.

        Raises:
            SampleError, ServerError, InterruptedError: as ``Generator.generate``; also for a server that samples from
                another model, or has weights of another run.
        """
        found = self._from_present_weights(prompts, step)
        answers = {index: group for index, group in enumerate(found) if not isinstance(group, AnswerError)}
        groups = [
            ResponseGroup(prompts[index], tuple(torch.tensor(answer.token_ids) for answer in group))
            for index, group in answers.items()
        ]
        # As in every engine, greedy responses have their log-probabilities at temperature 1.
        temperature = self.settings.temperature or 1.0
        scores = self._scorer.score(groups, temperature)
        reports_policy = self._check.compare(
            [answer.logprobs for group in answers.values() for answer in group],
            [values for group in scores for values in group],
            lambda: [values for group in self._scorer.score(groups, 1.0) for values in group],
            temperature,
            step,
        )
        if not reports_policy and self._pushed is None:
            raise ServerError(
                f"The server at {', '.join(self.settings.server.urls)} reports log-probabilities that are not those of "
                f"its policy at rollout.temperature={temperature:g} before filters and penalties, and with "
                "rollout.server.weights=keep nothing else says which policy sampled. Start vLLM with --logprobs-mode "
                "processed_logprobs and set no filters and penalties, or set rollout.temperature=1."
            )
        rollouts: list[tuple[Rollout, ...]] = [()] * len(prompts)
        for (index, answered), group, values in zip(answers.items(), groups, scores, strict=True):
            rollouts[index] = tuple(
                Rollout(
                    tokens,
                    torch.tensor(reported) if reports_policy and len(reported) == len(tokens) else logprobs,
                    answer.finish_reason,
                    answer.text,
                )
                for answer, tokens, logprobs in zip(answered, group.responses, values, strict=True)
                for reported in [answer.logprobs or ()]
            )
        return rollouts

    def _from_present_weights(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        """Answers of servers that have the present weights before and after them."""
        if self._pushed is None:
            return self._generator.generate(prompts, step)
        for _ in range(RESTARTS_TO_STOP):
            before = self._pushed.confirm()
            try:
                found = self._generator.generate(prompts, step)
            except ServerError:
                # A server that was started again refuses requests for the adapter that it had.
                if self._pushed.are_still(before):
                    raise
            else:
                if self._pushed.are_still(before):
                    return found
            self._generator.take_faults()
            self._log(f"step {step}: a server lost the weights of this run while it sampled; sampling again")
        raise ServerError(
            f"A server of {', '.join(self.settings.server.urls)} lost the weights of this run {RESTARTS_TO_STOP} times "
            f"while it sampled step {step}. Its log says why it was started again. run.resume=auto goes on."
        )

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        return self._generator.take_faults()

    def report(self, tally: Tally) -> None:
        """Add the number of repeated requests, hits of vLLM's caches, and the divergence of log-probabilities: of
        rollouts and of probes."""
        tally.add(RETRIED, self._generator.take_num_retried())
        counts = self._generator.take_cache_counts()
        for metric, cache in ((PREFIX_HITS, "prefix"), (MEDIA_HITS, "mm")):
            if queries := counts[f"{cache}_cache_queries"]:
                tally.add(metric, counts[f"{cache}_cache_hits"], queries)
        found = self._check.take()
        if found.tokens:
            tally.add(DIVERGENCE, found.kl, found.tokens)
            tally.add(DIVERGENCE_MAX, found.largest)
        if self._pushed is not None and (probed := self._pushed.take_divergence()).tokens:
            tally.add(PROBE_DIVERGENCE, probed.kl, probed.tokens)
            tally.add(PROBE_DIVERGENCE_MAX, probed.largest)


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

    def sync_weights(self) -> None:
        """Nothing: an evaluation changes no weights."""

    def release_memory(self) -> None:
        """Nothing: no update follows."""

    def use_checkpoint(self, checkpoint: Path) -> None:
        """Name this checkpoint in requests from now on; only for a server that loads by name."""
        self._generator.use_checkpoint(checkpoint)
