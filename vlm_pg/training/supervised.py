"""Batches of records' own responses: supervised training, and pairs of a chosen and a rejected response.

The update does the rest: questions on one video, and both responses of a pair, share their prefix there.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from vlm_pg.config import RunConfig
from vlm_pg.distributed import check_stop, gather_objects
from vlm_pg.errors import SampleError
from vlm_pg.metrics import LENGTH_CHART, Metric
from vlm_pg.models.reference import ScoringPolicy, scoring_phase
from vlm_pg.prompts.responses import ResponseBuilder
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.tally import Tally
from vlm_pg.training.collect import Batches, StepBatch
from vlm_pg.training.engines import Engine
from vlm_pg.training.groups import GROUPS, RESPONSE_LENGTH
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream
from vlm_pg.types import BadSample, Prompt, Rollout, RolloutGroup, Sample

TRAINED_LENGTH = Metric("trained_tokens_mean", "tokens with loss, mean", chart=LENGTH_CHART)


class SupervisedBatches(Batches):
    """A record's response is the one rollout of its question's group."""

    scores_itself = False

    def __init__(self, config: RunConfig, engine: Engine, stream: QuestionStream, phases: Phases):
        self._config, self._engine, self._policy = config, engine, engine.policy
        self._stream, self._phases = stream, phases
        self._responses = ResponseBuilder(engine.policy.processor, config.rollout.max_new_tokens)
        self.position = stream.position

    def warm_up(self) -> None:
        """See ``Batches``."""
        self._stream.decode_ahead(1)

    def collect(self, step: int, steps_ahead: int) -> StepBatch:
        """See ``Batches``."""
        samples = self._stream.take(self._config.training.prompts_per_step)
        with self._phases.timed("prompts"):
            questions = self._stream.load(samples)
            self._stream.decode_ahead(steps_ahead)
            order = {sample.sample_id: index for index, sample in enumerate(samples)}
            groups, bad = self._groups(questions, order)
            self._stream.record(bad)
        if (parallel := self._engine.parallel) is not None:
            prompts = parallel.gather_prompts([group.prompt for group in groups])
            parallel.prompts = {prompt.sample_id: prompt for prompt in prompts}
        groups = self._scored(groups)
        with self._phases.waiting():
            check_stop()
        self.position = self._stream.position
        tally = Tally()
        tally.add(GROUPS, len(groups))
        for response in (response for group in groups for response in group.rollouts):
            tally.add(RESPONSE_LENGTH, len(response.token_ids))
            tally.add(TRAINED_LENGTH, response.num_trained)
        tally.add(RESPONSE_LENGTH, 0, 0)  # exists without groups, too
        shown = [replace(group.without_features(), advantages=()) for group in groups]
        return StepBatch(shown, groups, None, tally.reduced())

    def _groups(
        self, questions: Sequence[tuple[Sample, Prompt]], order: dict[str, int]
    ) -> tuple[list[RolloutGroup], list[BadSample]]:
        groups, bad = [], []
        for sample, prompt in questions:
            try:
                rollouts = self._rollouts(sample, prompt)
            except SampleError as error:
                bad.append(BadSample(sample.sample_id, error.reason, str(error), sample.where))
                continue
            version, place, ones = self._policy.weights_version, order[sample.sample_id], (1.0,) * len(rollouts)
            group = RolloutGroup(sample, prompt, rollouts, version, advantages=ones, order=place)
            groups.append(replace(group, is_pair=len(rollouts) > 1))
        return groups, bad

    def _rollouts(self, sample: Sample, prompt: Prompt) -> tuple[Rollout, ...]:
        return (self._responses.build(sample, prompt),)

    def _scored(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return groups


class PairBatches(SupervisedBatches):
    """Chosen and rejected response are the two rollouts of a group, with the reference's log-probabilities.

    The reference scores both behind one prompt, and each pair once.

    Args:
        known: of pairs scored before, by a hash of what the reference read: log-probabilities of chosen and rejected
            response. Grows where there is more than one epoch, on all ranks alike.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        stream: QuestionStream,
        phases: Phases,
        reference: ScoringPolicy,
        known: dict[str, list[float]],
    ):
        super().__init__(config, engine, stream, phases)
        self._reference, self._known = reference, known
        self._scorer = PolicyScorer(reference, config.rollout.prefill_tokens)
        self._named = config.preference.reference or config.model.path
        self._keeps = config.training.steps * config.training.prompts_per_step > stream.num_samples

    def _rollouts(self, sample: Sample, prompt: Prompt) -> tuple[Rollout, ...]:
        return self._responses.pair(sample, prompt)

    def _scored(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        keys = {group.sample.sample_id: self._key(group) for group in groups}
        new = [group for group in groups if keys[group.sample.sample_id] not in self._known]
        score = self._scorer.score
        if self._engine.parallel is not None:
            score = partial(self._engine.parallel.score, self._scorer)
        with self._phases.timed("reference"), scoring_phase(self._reference), self._engine.gathered_parameters():
            found = score([group.response_group for group in new], 1.0)
        scored = {
            keys[group.sample.sample_id]: [float(logprobs.sum()) for logprobs in of_pair]
            for group, of_pair in zip(new, found, strict=True)
        }
        known = ChainMap(scored, self._known)
        groups = [_with_logprobs(group, known[keys[group.sample.sample_id]]) for group in groups]
        if self._keeps:  # on all ranks: any of them may get the pair in the next epoch
            for of_rank in gather_objects(scored):
                self._known |= of_rank
        return groups

    def _key(self, group: RolloutGroup) -> str:
        """Of all that the reference reads, and of itself: a resumed run may have other settings and records."""
        prompt, responses = group.prompt, group.response_group.responses
        digest = hashlib.sha256(f"{self._named}\n{prompt.content_key}".encode())
        for tensor in (prompt.input_ids, prompt.positions_3P, *responses):
            digest.update(str(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _with_logprobs(group: RolloutGroup, sums: Sequence[float]) -> RolloutGroup:
    """With log-probabilities of whole responses, equal parts at all tokens: the loss reads sums, in which large numbers
    at single tokens would round."""
    rollouts = []
    for rollout, of_response in zip(group.rollouts, sums, strict=True):
        length = len(rollout.token_ids)
        rollouts.append(replace(rollout, rollout_logprobs=torch.full((length,), of_response / length)))
    return replace(group, rollouts=tuple(rollouts))
