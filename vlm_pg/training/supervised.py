"""A step's batch for supervised training: records' own responses, each the one rollout of its question's group."""

from __future__ import annotations

from dataclasses import replace

from vlm_pg.config import RunConfig
from vlm_pg.distributed import check_stop
from vlm_pg.errors import SampleError
from vlm_pg.metrics import LENGTH_CHART, Metric
from vlm_pg.prompts.responses import ResponseBuilder
from vlm_pg.tally import Tally
from vlm_pg.training.collect import Batches, StepBatch
from vlm_pg.training.engines import Engine
from vlm_pg.training.groups import GROUPS, RESPONSE_LENGTH
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream
from vlm_pg.types import BadSample, Prompt, RolloutGroup, Sample

TRAINED_LENGTH = Metric("trained_tokens_mean", "tokens with loss, mean", chart=LENGTH_CHART)


class SupervisedBatches(Batches):
    """Batches of the records' responses. The update does the rest: questions on one video share its prefix there."""

    scores_itself = False

    def __init__(self, config: RunConfig, engine: Engine, stream: QuestionStream, phases: Phases):
        self._prompts_per_step = config.training.prompts_per_step
        self._engine, self._policy = engine, engine.policy
        self._stream, self._phases = stream, phases
        self._responses = ResponseBuilder(engine.policy.processor, config.rollout.max_new_tokens)
        self.position = stream.position

    def warm_up(self) -> None:
        """See ``Batches``."""
        self._stream.decode_ahead(1)

    def collect(self, step: int, steps_ahead: int) -> StepBatch:
        """See ``Batches``."""
        samples = self._stream.take(self._prompts_per_step)
        with self._phases.timed("prompts"):
            questions = self._stream.load(samples)
            self._stream.decode_ahead(steps_ahead)
            order = {sample.sample_id: index for index, sample in enumerate(samples)}
            groups, bad = self._groups(questions, order)
            self._stream.record(bad)
        if (parallel := self._engine.parallel) is not None:
            prompts = parallel.gather_prompts([group.prompt for group in groups])
            parallel.prompts = {prompt.sample_id: prompt for prompt in prompts}
        with self._phases.waiting():
            check_stop()
        self.position = self._stream.position
        tally = Tally()
        tally.add(GROUPS, len(groups))
        for group in groups:
            (response,) = group.rollouts
            tally.add(RESPONSE_LENGTH, len(response.token_ids))
            tally.add(TRAINED_LENGTH, response.num_trained)
        tally.add(RESPONSE_LENGTH, 0, 0)  # exists without groups, too
        shown = [replace(group.without_features(), advantages=()) for group in groups]
        return StepBatch(shown, groups, None, tally.reduced())

    def _groups(
        self, questions: list[tuple[Sample, Prompt]], order: dict[str, int]
    ) -> tuple[list[RolloutGroup], list[BadSample]]:
        groups, bad = [], []
        for sample, prompt in questions:
            try:
                response = self._responses.build(sample, prompt)
            except SampleError as error:
                bad.append(BadSample(sample.sample_id, error.reason, str(error), sample.where))
                continue
            version, place = self._policy.weights_version, order[sample.sample_id]
            groups.append(RolloutGroup(sample, prompt, (response,), version, advantages=(1.0,), order=place))
        return groups, bad
