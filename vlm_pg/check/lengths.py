"""Prompt lengths and whether they fit, measured in several processes once there are many prompts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from vlm_pg.errors import ModelError, SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.pool import WorkerPool
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import PromptMeasure, Wording
from vlm_pg.prompts.prompt_source import refuse_without_gold
from vlm_pg.prompts.responses import ResponseBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import Sample

# This many prompts take as long in this process as others take to start.
IN_PROCESS_PROMPTS = 2_000
# Of a chunk of prompts; the first of a process waits until the processor is loaded.
_DEADLINE_SECONDS = 600.0
_MODULES = ("vlm_pg.check.lengths", "transformers.processing_utils")
Question = tuple[Sample, tuple[MediaFacts, ...]]


class Length(NamedTuple):
    """Tokens of a prompt (None: there is no prompt), and its fault: reason and message."""

    tokens: int | None
    fault: tuple[str, str] | None = None


@dataclass(frozen=True)
class LengthRules:
    """The model, the prompt around questions, and the length of the longest response.

    ``wording`` and ``answer_prefix``: as of ``PromptBuilder``. ``objective``: what the records are for; with rl, or in
    evaluation, responses to them are scored.
    """

    model: ModelSettings
    prompt: PromptSettings
    response_tokens: int
    wording: Wording | None = None
    answer_prefix: str = ""
    objective: str = "rl"


class Measurer:
    """Measures prompts in this process."""

    def __init__(self, rules: LengthRules, model: WeightlessPolicy):
        self._model, self._response_tokens = model, rules.response_tokens
        self._measure = PromptMeasure(
            model.processor, rules.prompt, model.positions, rules.wording, rules.answer_prefix
        )
        self._objective = rules.objective
        self._responses = ResponseBuilder(model.processor, rules.response_tokens)

    def length(self, sample: Sample, facts: Sequence[MediaFacts]) -> Length:
        """Of one prompt. Raises ModelError: the sample has media and the model reads text alone."""
        tokens = None
        try:
            prompt = self._measure.measure(sample, facts)
            tokens = prompt.num_tokens
            self._measure.check(prompt)
            self._model.check_length(prompt, self._response_tokens)
            if self._objective == "rl":
                refuse_without_gold(sample)
            elif self._objective == "sft":
                self._responses.build(sample, prompt)
            elif self._objective == "dpo":
                self._responses.pair(sample, prompt)
        except SampleError as fault:
            return Length(tokens, (fault.reason, str(fault)))
        return Length(tokens)


class PromptLengths(AbstractContextManager["PromptLengths"]):
    """Measures prompts, the first in this process, later ones in ``workers`` others, which the context manager ends."""

    def __init__(self, workers: int, model: WeightlessPolicy):
        self._workers, self._model = workers, model
        self._measurers: dict[bytes, Measurer] = {}
        self._pool: WorkerPool | None = None
        self._num_prompts = 0

    def start(self, questions: Sequence[Question], rules: LengthRules) -> Callable[[], list[Length]]:
        """Start to measure. The returned function waits for the lengths, in order; it raises as ``Measurer.length``."""
        self._num_prompts += len(questions)
        key = pickle.dumps(rules)
        if key not in self._measurers:
            self._measurers[key] = Measurer(rules, self._model)
        measurer = self._measurers[key]
        if self._num_prompts <= IN_PROCESS_PROMPTS or not self._workers:
            return lambda: [measurer.length(*one) for one in questions]
        if self._pool is None:
            self._pool = WorkerPool(self._workers, _DEADLINE_SECONDS, (*_MODULES, *self._processor_modules()))
        size = -(-len(questions) // self._workers)
        chunks = [questions[start : start + size] for start in range(0, len(questions), size)]
        futures = [self._pool.submit(measured, key, chunk, label="prompts") for chunk in chunks]

        def results() -> list[Length]:
            lengths: list[Length] = []
            for future in futures:
                try:
                    found = future.result()
                except SampleError as error:  # the process ended or hung: no fault of any one record
                    raise RuntimeError(f"a process that measured prompts was lost: {error}") from error
                if isinstance(found, str):
                    raise ModelError(found)
                lengths += found
            return lengths

        return results

    def _processor_modules(self) -> list[str]:
        """Modules of the processor's classes: workers share them if they are imported before the fork."""
        processor = self._model.processor
        parts = (getattr(processor, name, None) for name in ("tokenizer", "image_processor", "video_processor"))
        known = {type(one).__module__ for one in (processor, self._model.config, *parts) if one is not None}
        return sorted(name for name in known if name.startswith("transformers."))

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.close()


def measured(rules: bytes, questions: Sequence[Question]) -> list[Length] | str:
    """In a worker: the lengths, or the message of a ModelError."""
    try:
        return [_measurer(rules).length(*one) for one in questions]
    except ModelError as error:
        return str(error)


@cache
def _measurer(pickled: bytes) -> Measurer:
    rules: LengthRules = pickle.loads(pickled)
    return Measurer(rules, _model(pickle.dumps(rules.model)))


@cache
def _model(settings: bytes) -> WeightlessPolicy:
    return WeightlessPolicy(pickle.loads(settings))
