"""How long prompts are and whether they fit, in several processes once there are many of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

from vlm_pg.errors import ModelError, SampleError
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.probe import MediaFacts
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import PromptMeasure, Wording
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import Sample

# So many prompts take no longer here than processes take to start.
ALONE = 2_000
# Of some prompts; the first of a process waits for it to read the processor.
_DEADLINE_SECONDS = 600.0
_MODULES = ("vlm_pg.check.lengths", "transformers.processing_utils")
Question = tuple[Sample, tuple[MediaFacts, ...]]


@dataclass(frozen=True)
class Length:
    """Tokens of a prompt (None: there is no prompt), and what is wrong with it: reason and message."""

    tokens: int | None
    fault: tuple[str, str] | None = None


@dataclass(frozen=True)
class LengthRules:
    """The model, what is written around questions, and how long the longest response is.

    ``wording`` and ``answer_prefix``: as of ``PromptBuilder``.
    """

    model: ModelSettings
    prompt: PromptSettings
    response_tokens: int
    wording: Wording | None = None
    answer_prefix: str = ""


class Measurer:
    """Measures in this process; see ``LengthRules``."""

    def __init__(self, rules: LengthRules, model: WeightlessPolicy | None = None):
        self._model = WeightlessPolicy(rules.model) if model is None else model
        self._measure = PromptMeasure(
            self._model.processor, rules.prompt, self._model.positions, rules.wording, rules.answer_prefix
        )
        self._response_tokens = rules.response_tokens

    @property
    def modules(self) -> list[str]:
        """Where the processor's classes come from: what processes share, if it is imported before they are forked."""
        processor = self._model.processor
        parts = (getattr(processor, name, None) for name in ("tokenizer", "image_processor", "video_processor"))
        known = {type(one).__module__ for one in (processor, self._model.config, *parts) if one is not None}
        return sorted(name for name in known if name.startswith("transformers."))

    def length(self, sample: Sample, facts: Sequence[MediaFacts]) -> Length:
        """Of one prompt.

        Raises:
            ModelError: the sample has media and the model reads text alone.
        """
        tokens = None
        try:
            prompt = self._measure.measure(sample, facts)
            tokens = prompt.num_tokens
            self._measure.check(prompt)
            self._model.check_length(prompt, self._response_tokens)
        except SampleError as fault:
            return Length(tokens, (fault.reason, str(fault)))
        return Length(tokens)


class Lengths(AbstractContextManager["Lengths"]):
    """Measures here at first, and in processes when many prompts have come; a context manager, which ends them.

    Args:
        workers: number of processes; 0: all here.
        model: of all rules.
    """

    def __init__(self, workers: int, model: WeightlessPolicy):
        self._workers, self._model = workers, model
        self._here: dict[bytes, Measurer] = {}
        self._pool: WorkerPool | None = None
        self._seen = 0

    def start(self, questions: Sequence[Question], rules: LengthRules) -> Callable[[], list[Length]]:
        """Begin to measure. What is returned waits for the lengths, in order, and raises what ``length`` does."""
        self._seen += len(questions)
        key = pickle.dumps(rules)
        if key not in self._here:
            self._here[key] = Measurer(rules, self._model)
        here = self._here[key]
        if self._seen <= ALONE or not self._workers:
            return lambda: [here.length(*one) for one in questions]
        if self._pool is None:
            self._pool = WorkerPool(self._workers, _DEADLINE_SECONDS, (*_MODULES, *here.modules))
        size = -(-len(questions) // self._workers)
        chunks = [questions[start : start + size] for start in range(0, len(questions), size)]
        futures = [self._pool.submit(measured, key, chunk, label="prompts") for chunk in chunks]
        return lambda: [length for future in futures for length in _result(future)]

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.close()


def measured(rules: bytes, questions: Sequence[Question]) -> list[Length] | str:
    """In a process: the lengths, or what a ModelError says."""
    try:
        return [_measurer(rules).length(*one) for one in questions]
    except ModelError as error:
        return str(error)


@cache
def _measurer(rules: bytes) -> Measurer:
    read: LengthRules = pickle.loads(rules)
    return Measurer(read, _model(pickle.dumps(read.model)))


@cache
def _model(settings: bytes) -> WeightlessPolicy:
    return WeightlessPolicy(pickle.loads(settings))


def _result(future: Future[list[Length] | str]) -> list[Length]:
    try:
        found = future.result()
    except SampleError as error:  # the process ended or hung: no fault of any one record
        raise RuntimeError(f"a process that measured prompts was lost: {error}") from error
    if isinstance(found, str):
        raise ModelError(found)
    return found
