"""Samplers on servers: ``ServerEngine`` keeps their weights at the policy's, for training; ``ControlSampler`` samples
T-GRPO's control groups from these weights; ``UnscoredSampler`` serves evaluations."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from vlm_pg.distributed import barrier, max_over_ranks
from vlm_pg.errors import AnswerError, SampleError, ServerError
from vlm_pg.metrics import Metric
from vlm_pg.rollout.contracts import Answer, Generator, Sampler, control_key
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.ahead import Jobs
from vlm_pg.rollout.server.dialects import REPORTING
from vlm_pg.rollout.server.divergence import DivergenceCheck
from vlm_pg.rollout.server.generator import bad_samples, query_server
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.remote import make_generator
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

LAG = Metric("rollout_lag", "updates")
# Of rollouts that went on after an update.
CONTINUED = Metric("rollouts_continued", "share of rollouts")
# Shares of a step's time.
TRAINER_IDLE = Metric("idle/trainer", "share of the step")
SERVER_IDLE = Metric("idle/server", "share of the step")

# Of a server that is started again within one step's sampling.
RESTARTS_TO_STOP = 3


class SampledAhead(NamedTuple):
    """Answers for a step that were requested during earlier ones. ``answers``: None if the server lost the weights.

    ``updates``: of the weights that servers had at the request.
    """

    answers: list[list[Answer] | AnswerError] | None
    updates: int | None


class ServerEngine(Sampler):
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
        ahead = settings.staleness > 0
        if ahead and server.kind not in REPORTING:
            raise ServerError(
                f"rollout.staleness is {settings.staleness}, and a server of kind {server.kind} reports no "
                "log-probabilities, without which rollouts of older weights cannot be trained on. Use vLLM or SGLang, "
                "or set rollout.staleness=0."
            )
        self._generator = make_generator(
            self.policy, settings, seed, should_stop, messages, log, server, needs_logprobs=keeps or ahead
        )
        self.server, self.stop_token_ids = server, self._generator.stop_token_ids
        urls = ", ".join(settings.server.urls)
        self._check = DivergenceCheck(urls, server.kind, settings, self._generator.log_once)
        self._jobs = Jobs[SampledAhead]()
        self._synced_step = 0
        self._waited_seconds, self._reported_at = 0.0, time.monotonic()
        self._lags: list[float] = []
        self._continued: list[bool] = []
        self._faults: list[BadSample] = []
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

    def sync_weights(self, step: int) -> None:
        """Bring the policy's present weights to the servers; with ``rollout.server.weights=keep`` nothing.

        While a later step is sampled the servers keep the weights that it began with, unless ``rollout.in_flight`` says
        otherwise; ``may_start`` is False for steps to which these would be too old. So no sampling waits for an update,
        and no update for a later step.

        Raises:
            ServerError, OSError, InterruptedError: as ``PushedWeights.sync``.
        """
        if self._pushed is None:
            return
        if step in self._jobs and not self.settings.interrupts:
            with self._waiting():
                done = [key for key in (step, control_key(step)) if key in self._jobs and not self._jobs.failure(key)]
                lost = any(self._jobs.result(key).answers is None for key in done)
            here = {"lost": float(lost), "running": float(self._jobs.any_running)}
            found = max_over_ranks(here, self.policy.device)
            if found["running"] and not found["lost"]:
                return
            self._jobs.wait()
            barrier()
        self._pushed.sync()
        self._synced_step = step
        if self._pushed.adapter is not None:
            self._generator.model_name = self._pushed.adapter

    def may_start(self, step: int) -> bool:
        """Whether the weights that the servers have are at most ``rollout.staleness`` steps older than this step's."""
        return self._synced_step > 0 and step - self._synced_step <= self.settings.staleness

    def start(self, prompts: Sequence[Prompt], step: int | str, count: int | None = None) -> None:
        """Request a later step's answers in a thread."""
        assert self._pushed is not None
        pushed, prompts, updates = self._pushed, list(prompts), self._pushed.updates

        def work() -> SampledAhead:
            interrupts, before = self.settings.interrupts, pushed.present() or ()
            if not before and not interrupts:
                return SampledAhead(None, updates)
            try:
                found = self._generator.generate(prompts, step, count)
            except ServerError:
                if pushed.present() if interrupts else pushed.are_still(before):
                    raise
                return SampledAhead(None, updates)
            answers = [answer for group in found if not isinstance(group, AnswerError) for answer in group]
            known = None not in map(self._token_versions, answers) if interrupts else pushed.are_still(before)
            return SampledAhead(found if known else None, updates)

        self._jobs.start(step, work)

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
        with self._waiting():
            found, updates = self._answers(prompts, step)
        self._faults += bad_samples(prompts, found)
        answers = {index: group for index, group in enumerate(found) if not isinstance(group, AnswerError)}
        groups = [
            ResponseGroup(prompts[index], tuple(torch.tensor(answer.token_ids) for answer in group))
            for index, group in answers.items()
        ]
        # As in every engine, greedy responses have their log-probabilities at temperature 1.
        temperature = self.settings.temperature or 1.0
        scores: list[list[torch.Tensor]] | None = None
        present = self.policy.weights_version
        versions = {id(answer): self._token_versions(answer) or () for group in answers.values() for answer in group}
        if updates in (None, present) and all(set(of_answer) <= {present} for of_answer in versions.values()):
            scores = self._scorer.score(groups, temperature)
            self._check.compare(
                [answer.logprobs for group in answers.values() for answer in group],
                [values for group in scores for values in group],
                lambda: [values for group in self._scorer.score(groups, 1.0) for values in group],
                temperature,
                step,
            )
        reports_policy = self._check.reports_policy
        if not reports_policy and (self._pushed is None or self.settings.staleness):
            raise ServerError(
                f"The server at {', '.join(self.settings.server.urls)} reports log-probabilities that are not those of "
                f"its policy at rollout.temperature={temperature:g} before filters and penalties, and with "
                "rollout.server.weights=keep or rollout.staleness nothing else says which policy sampled. Start vLLM "
                "with --logprobs-mode processed_logprobs and set no filters and penalties, or set "
                "rollout.temperature=1."
            )
        rollouts: list[tuple[Rollout, ...]] = [()] * len(prompts)
        for number, (index, answered) in enumerate(answers.items()):
            for place, answer in enumerate(answered):
                tokens, reported = groups[number].responses[place], answer.logprobs or ()
                if reports_policy and len(reported) == len(tokens):
                    logprobs = torch.tensor(reported)
                else:
                    assert scores is not None
                    logprobs = scores[number][place]
                by_token = versions[id(answer)]
                sampled_by = by_token[0] if by_token else updates
                rollout = Rollout(
                    tokens,
                    logprobs,
                    answer.finish_reason,
                    answer.text,
                    weights_version=sampled_by,
                    token_versions=by_token,
                )
                rollouts[index] += (rollout,)
                if sampled_by is not None:
                    self._lags.append(present - (fmean(by_token) if by_token else sampled_by))
                    self._continued.append(len(set(by_token)) > 1)
        return rollouts

    def _answers(
        self, prompts: Sequence[Prompt], step: int | str, count: int | None = None
    ) -> tuple[list[list[Answer] | AnswerError], int | None]:
        """Answers, and the updates of the weights that sampled them; None with kept weights."""
        if step in self._jobs:
            ahead = self._jobs.result(step)
            self._jobs.drop(step)
            if ahead.answers is not None:
                return ahead.answers, ahead.updates
            self._log(f"step {step}: a server lost the weights of this run while it sampled; sampling again")
        found = self._from_present_weights(prompts, step, count)
        return found, None if self._pushed is None else self._pushed.updates

    def _token_versions(self, answer: Answer) -> tuple[int, ...] | None:
        """Updates of the weights that sampled each token, by the server's own record; empty where it keeps none, None
        where some token is from weights that are not this run's."""
        if not self.settings.interrupts:
            return ()
        assert self._pushed is not None
        found = [self._pushed.updates_of(version) for version in answer.weight_versions or ()]
        known = [updates for updates in found if updates is not None]
        return tuple(known) if len(known) == len(answer.token_ids) else None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around what the trainer waits for."""
        start_seconds = time.monotonic()
        try:
            yield
        finally:
            self._waited_seconds += time.monotonic() - start_seconds

    def _from_present_weights(
        self, prompts: Sequence[Prompt], step: int | str, count: int | None
    ) -> list[list[Answer] | AnswerError]:
        """Answers of servers that have the present weights before and after them."""
        if self._pushed is None:
            return self._generator.generate(prompts, step, count)
        for _ in range(RESTARTS_TO_STOP):
            before = self._pushed.confirm()
            try:
                found = self._generator.generate(prompts, step, count)
            except ServerError:
                # A server that was started again refuses requests for the adapter that it had.
                if self._pushed.are_still(before):
                    raise
            else:
                if self._pushed.are_still(before):
                    return found
            self._log(f"step {step}: a server lost the weights of this run while it sampled; sampling again")
        raise ServerError(
            f"A server of {', '.join(self.settings.server.urls)} lost the weights of this run {RESTARTS_TO_STOP} times "
            f"while it sampled step {step}. Its log says why it was started again. run.resume=auto goes on."
        )

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        found, self._faults = self._faults, []
        return found

    def report(self, tally: Tally) -> None:
        """Add the number of repeated requests, hits of vLLM's caches, and the divergence of log-probabilities: of
        rollouts and of probes."""
        tally.add(RETRIED, self._generator.take_num_retried())
        now, busy_seconds, ahead = time.monotonic(), self._jobs.take_busy_seconds(), self.settings.staleness > 0
        seconds, self._reported_at = max(1e-9, now - self._reported_at), now
        tally.add(TRAINER_IDLE, min(1.0, self._waited_seconds / seconds))
        tally.add(SERVER_IDLE, 1.0 - min(1.0, (busy_seconds if ahead else self._waited_seconds) / seconds))
        self._waited_seconds = 0.0
        if self._pushed is not None:
            tally.add(LAG, sum(self._lags), len(self._lags))
        if self.settings.interrupts:
            tally.add(CONTINUED, sum(self._continued), len(self._continued))
        self._lags, self._continued = [], []
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


class UnscoredSampler(Sampler):
    """A ``Sampler`` for evaluations: ``rollout_logprobs`` are NaN, since there are no weights here to score with.

    A prompt that this kind of generator does not support (``video_for_server``) is a fault of that question alone.
    """

    scores_itself = False

    def __init__(self, generator: Generator):
        self._generator = generator
        self._faults: list[BadSample] = []

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
                self._faults.append(fault)
        groups: list[tuple[Rollout, ...]] = [()] * len(prompts)
        sent = [prompts[index] for index in supported]
        found = self._request(sent, step)
        self._faults += bad_samples(sent, found)
        for index, answers in zip(supported, found, strict=True):
            for answer in () if isinstance(answers, AnswerError) else answers:
                unknown = torch.full((len(answer.token_ids),), torch.nan)
                groups[index] += (Rollout(torch.tensor(answer.token_ids), unknown, answer.finish_reason, answer.text),)
        return groups

    def _request(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        return self._generator.generate(prompts, step)

    def take_faults(self) -> list[BadSample]:
        """Questions without valid answers since the last call, and why."""
        found, self._faults = self._faults, []
        return found

    def report(self, tally: Tally) -> None:
        """Nothing: an evaluation counts its questions itself, and a ``ServerEngine`` the requests of controls."""


class ControlSampler(UnscoredSampler):
    """Samples T-GRPO's control groups, ``count`` rollouts each, with the weights and in the threads of ``engine``."""

    def __init__(self, engine: ServerEngine, count: int):
        super().__init__(engine._generator)
        self._engine, self._count = engine, count

    def may_start(self, step: int) -> bool:
        """As ``ServerEngine.may_start``; also for the present step, whose groups are sampled meanwhile."""
        return self._engine.may_start(step)

    def start(self, prompts: Sequence[Prompt], step: int | str) -> None:
        """Request the answers in a thread."""
        self._engine.start(prompts, step, self._count)

    def _request(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        with self._engine._waiting():
            return self._engine._answers(prompts, step, self._count)[0]

    def take_faults(self) -> list[BadSample]:
        """Questions without a control group since the last call, and why."""
        return [replace(fault, message=f"no control group: {fault.message}") for fault in super().take_faults()]
