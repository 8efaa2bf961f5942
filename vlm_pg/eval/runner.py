"""Answering the questions of evaluation sets, batch by batch, and reading the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import SINGLE_RANK, Meeting, RankLayout, gather_objects
from vlm_pg.eval.answer_files import AnswerFiles, Row
from vlm_pg.eval.contracts import Answered, Output, Reader, Reading, cluster_of
from vlm_pg.eval.eval_set import EvalSet, read_sets
from vlm_pg.eval.readers import reader_name, reader_of, strict_reading
from vlm_pg.media.sampling import FRAME_MULTIPLE, video_max_pixels
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import BadSample, MediaRef, Prompt, Rollout, Sample

if TYPE_CHECKING:
    from vlm_pg.answers.whole import WholeReader

# Batches are assigned to ranks whole, so that what is computed together is the same for any number of them.
MAX_BATCH_QUESTIONS = 32
# Prompts of a batch are in memory at a time. A visual token has pixels of 19 kB (Qwen2.5-VL; float32), a batch 5 GB.
MAX_BATCH_VISUAL_TOKENS = 2**18

# (sample, its prompt, its index in its set) -> further keys of its row, for the report
DescribePrompt = Callable[[Sample, Prompt, int], Mapping[str, Any]]
# The rollouts of each prompt, and why some have none.
Sampled = tuple[list[tuple[Rollout, ...]], list[BadSample]]


@dataclass(frozen=True)
class EvalModel:
    """A policy, and what its answers need: prompts and rewards as in training.

    ``whole``: reads whole outputs. ``ranks``: take batches of questions round-robin. ``gathered_parameters``: entered
    around sampling. ``sampler_of``: the sampler of a set; None: the policy itself, which must have its weights then.
    ``stop_requests``: ends running requests of samplers that work in another process; they sample one batch while the
    prompts of the next are made.
    """

    policy: Policy | WeightlessPolicy
    sources: SourcePool
    rewarder: Rewarder
    whole: WholeReader
    ranks: RankLayout = SINGLE_RANK
    gathered_parameters: Callable[[], AbstractContextManager[None]] = nullcontext
    should_stop: Callable[[], bool] = lambda: False
    sampler_of: Callable[[EvalSet], Sampler] | None = None
    stop_requests: Callable[[], None] | None = None


@dataclass
class _Question:
    """A question with its outputs so far, of all tampered forms, or its fault. ``index``: in its set."""

    sample: Sample
    index: int
    outputs: list[Output] = field(default_factory=list)
    formats: list[float | None] = field(default_factory=list)
    fault: BadSample | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> Row:
        row = Answered.of(self.sample, tuple(self.outputs)).to_row() | {"formats": self.formats, **self.shown}
        if self.fault is None:
            return row
        fault = (self.fault.reason, self.fault.message)
        return Answered.of(self.sample, (), fault).to_row() | {"where": self.fault.where, "trace": self.fault.trace}


@dataclass(frozen=True)
class _Submitted:
    """Prompts of a batch that a sampler works on. ``is_last``: no other form of its questions follows."""

    prompts: Sequence[tuple[Sample, Prompt]]
    questions: Mapping[str, _Question]
    sampled: Callable[[], Sampled]
    is_last: bool


class Evaluator:
    """Runs all evaluation sets of a configuration against one policy, with its weights of that moment.

    Args:
        bad_log: receives records and questions that cannot be used, on the first rank.
        describe: further keys of a question's row.
    """

    def __init__(
        self,
        config: RunConfig,
        eval_model: EvalModel,
        console: Console,
        bad_log: BadSampleLog | None,
        describe: DescribePrompt = lambda sample, prompt, index: {},
    ):
        self._config, self._console, self._bad_log, self._describe = config, console, bad_log, describe
        self._model, self._ranks, self._should_stop = eval_model, eval_model.ranks, eval_model.should_stop
        self._recorded: set[str] = set()
        self.sets = read_sets(config, eval_model.policy, console, bad_log)
        for item in self.sets:
            self._reader(item)
            item.check_details()

    def run(self, tag: str, files: AnswerFiles) -> dict[str, Any]:
        """Evaluate every set: the headline figures, and those of each set under ``sets``.

        Questions whose rows ``files`` holds from an unfinished evaluation are not asked again. The answers of each set
        are written there, in the order of its records.

        Args:
            tag: e.g. "before", for the progress bar.
        """
        # All ranks read before any of them writes.
        finished = gather_objects({item.name: files.finished_rows(item.name) for item in self.sets})[0]
        if done := sum(map(len, finished.values())):
            self._console.info(f"going on: {done:,} question(s) were answered before")
        # Of all sets first: sampling settings that are not supported are an error before any question.
        samplers = [self._sampler(item) for item in self.sets]
        results: dict[str, Any] = {}
        total = sum(len(item.samples) for item in self.sets)
        with self._console.progress(f"evaluating {tag}", total) as bar, self._model.gathered_parameters():
            # Ranks are independent here: their rows are gathered afterwards.
            rows_here = []
            for item, sampler in zip(self.sets, samplers, strict=True):
                scores: list[float] = []

                def advance(rows: list[Row], scores: list[float] = scores) -> None:
                    scores += [score for row in rows if (score := Answered.from_row(row).score) is not None]
                    accuracy = f"accuracy {sum(scores) / len(scores):.3f}" if scores else ""
                    bar.advance(min(len(rows) * self._ranks.world_size, total - bar.done), accuracy)

                rows_here.append(self._answer_set(item, sampler, finished[item.name], files, advance))
        # Outside the block: where weights are gathered in lockstep, a rank that is done helps the others to its end.
        Meeting().wait(self._should_stop)
        for item, found in zip(self.sets, rows_here, strict=True):
            by_id = {row["sample_id"]: row for part in gather_objects(found) for row in part}
            rows = [by_id[sample.sample_id] for sample in item.samples]
            if item.kind == "eval" and self._bad_log is not None and item.name not in self._recorded:
                # A control shows the same files again, and so does the next evaluation.
                self._recorded.add(item.name)
                faults = [_fault_of(row) for row in rows if row["fault"] is not None]
                self._bad_log.record_tried(len(item.samples), faults)
            if self._ranks.is_rank0:
                files.complete(item.name, rows)
            formats = [value for row in rows for value in row.get("formats", ())]
            reader = reader_name(self._config.eval.reader, item.protocol)
            results[item.name] = item.figures([Answered.from_row(row) for row in rows], reader, formats)
        headline = next((name for name in (self._config.eval.headline_set, *results) if name in results), None)
        chosen = results[headline] if headline is not None else {"accuracy": None, "n": 0}
        return {"accuracy": chosen["accuracy"], "n": chosen["n"], "headline_set": headline, "sets": results}

    def _reader(self, item: EvalSet) -> Reader | None:
        return reader_of(reader_name(self._config.eval.reader, item.protocol), item.protocol, self._model.whole)

    def _sampler(self, item: EvalSet) -> Sampler:
        if self._model.sampler_of is not None:
            return self._model.sampler_of(item)
        assert isinstance(self._model.policy, Policy)
        config = self._config
        return RolloutEngine(self._model.policy, item.rollout(config), item.seed(config), self._should_stop)

    def _batches(self, item: EvalSet, media: MediaSettings) -> list[list[Sample]]:
        """The batches of this rank."""
        rollout = item.rollout(self._config)
        size = min(max(1, rollout.max_batch_rollouts // rollout.num_generations), MAX_BATCH_QUESTIONS)
        if self._model.stop_requests is not None:
            # A server's answers do not depend on the batch: enough to keep all requests in flight.
            in_flight = rollout.server.concurrency
            size = max(in_flight, min(2 * in_flight, MAX_BATCH_QUESTIONS))
        tokens_of = partial(max_visual_tokens, media=media, factor=self._model.policy.pixel_factor)
        batches = batches_of(item.samples, size, tokens_of, shares_media=item.tampers == (None,))
        return batches[self._ranks.rank :: self._ranks.world_size]

    def _answer_set(
        self,
        item: EvalSet,
        sampler: Sampler,
        finished: Mapping[str, Row],
        files: AnswerFiles,
        advance: Callable[[list[Row]], None],
    ) -> list[Row]:
        """The rows of this rank's batches; new ones are also appended to its part file."""
        config = self._config
        asking = item.asking(config, self._model.policy)
        source = self._model.sources.for_records(item.records, item.name, options=asking)
        reader = self._reader(item)
        rows: list[Row] = []
        indices = {sample.sample_id: index for index, sample in enumerate(item.samples)}
        # An incomplete batch is asked again as a whole, so that the same is computed together; one with a fault, too,
        # which may have been repaired since.
        open_batches = []
        for batch in self._batches(item, config.media if asking is None else asking.media):
            found = [finished[sample.sample_id] for sample in batch if sample.sample_id in finished]
            if len(found) == len(batch) and all(row["fault"] is None for row in found):
                rows += found
            else:
                open_batches.append(batch)
        if rows:
            advance(rows)
        submitted: deque[_Submitted] = deque()

        def finish(one: _Submitted) -> None:
            rollouts, faults = one.sampled()
            for fault in faults:
                one.questions[fault.sample_id].fault = fault
            self._read(one.prompts, rollouts, one.questions, reader)
            if one.is_last:
                found = [question.to_row() for question in one.questions.values()]
                files.append(item.name, found)
                rows.extend(found)
                advance(found)

        with Prefetcher(sampler, self._model.stop_requests) as prefetcher:
            for number, batch in enumerate(open_batches):
                questions = {sample.sample_id: _Question(sample, indices[sample.sample_id]) for sample in batch}
                if number + 1 < len(open_batches):
                    source.prefetch([*batch, *open_batches[number + 1]])
                for form, tamper in enumerate(item.tampers):
                    prompts, faults = source.load(batch, tamper, self._should_stop)
                    for fault in faults:
                        questions[fault.sample_id].fault = fault
                    sampled = prefetcher.submit([prompt for _, prompt in prompts], f"eval/{item.name}/{form}")
                    submitted.append(_Submitted(prompts, questions, sampled, form + 1 == len(item.tampers)))
                    del prompts, sampled  # free their pixels before the next are decoded
                    while len(submitted) > prefetcher.depth:
                        finish(submitted.popleft())
            while submitted:
                finish(submitted.popleft())
        return rows

    def _read(
        self,
        prompts: Sequence[tuple[Sample, Prompt]],
        rollouts: Sequence[tuple[Rollout, ...]],
        questions: Mapping[str, _Question],
        reader: Reader | None,
    ) -> None:
        """Add the rollouts as outputs, with their readings."""
        pairs = [(sample, rollout) for (sample, _), each in zip(prompts, rollouts, strict=True) for rollout in each]
        readings = self._strict_readings(pairs) if reader is None else list(self._readings(pairs, reader))
        for sample, prompt in prompts:
            question = questions[sample.sample_id]
            question.shown = question.shown or self._describe(sample, prompt, question.index)
        for (sample, rollout), (reading, has_format) in zip(pairs, readings, strict=True):
            question = questions[sample.sample_id]
            question.outputs.append(Output(rollout.text, reading, rollout.finish_reason, len(rollout.token_ids)))
            question.formats.append(has_format)

    def _strict_readings(self, pairs: Sequence[tuple[Sample, Rollout]]) -> list[tuple[Reading, float | None]]:
        """By training's reward, and whether each output has the format that it rewards."""
        responses = [Response(sample, rollout.text, len(rollout.token_ids)) for sample, rollout in pairs]
        rewards = self._model.rewarder.score(responses, self._should_stop)
        settings = self._config.reward
        return [
            (strict_reading(sample, rollout.text, reward, settings), reward.parts.get("format"))
            for (sample, rollout), reward in zip(pairs, rewards, strict=True)
        ]

    def _readings(
        self, pairs: Sequence[tuple[Sample, Rollout]], reader: Reader
    ) -> Iterator[tuple[Reading, float | None]]:
        """Of whole outputs, for which no format is expected."""
        for sample, rollout in pairs:
            if self._should_stop():
                raise InterruptedError("stopped while answers were read")
            yield reader(sample, rollout.text, rollout.finish_reason == "length"), None


def _fault_of(row: Row) -> BadSample:
    reason, message = row["fault"]
    return BadSample(row["sample_id"], reason, message, row["where"], row["trace"])


# ---- batches ----


def batches_of(
    samples: Sequence[Sample],
    max_questions: int,
    tokens_of: Callable[[MediaRef], int],
    max_tokens: int = MAX_BATCH_VISUAL_TOKENS,
    shares_media: bool = True,
) -> list[list[Sample]]:
    """Questions in the order of the records, except that those on the same media follow the first of them.

    A function of questions and settings alone, never of ranks or of time. Questions on the same media are in one batch
    if it can hold all of them: they share decoding, pixels, visual features and the beginning of their prompts. So a
    batch may have fewer questions than ``max_questions``.

    Args:
        tokens_of: upper bound of the visual tokens of a medium.
        max_tokens: of the media of a batch, each counted once for all questions on it; one question may have more.
        shares_media: False where each question is shown frames of its own (controls): all count.
    """
    batches: list[list[Sample]] = []
    room = 0
    for group in _groups(samples, shares_media):
        cost = sum(map(tokens_of, group[0].media))
        if not batches or len(batches[-1]) + len(group) > max_questions or cost > room:
            batches.append([])
            room = max_tokens
        room -= cost
        for sample in group:
            if len(batches[-1]) == max_questions:
                batches.append([])
                room = max_tokens - cost
            batches[-1].append(sample)
    return batches


def max_visual_tokens(ref: MediaRef, media: MediaSettings, factor: int) -> int:
    """Upper bound of a medium's visual tokens, from settings alone; ``factor``: pixels of a visual token's side."""
    if ref.kind == "image":
        return media.image_max_pixels // factor**2
    frames = max(len(ref.times), FRAME_MULTIPLE) if ref.times else media.most_frames
    of_frame = video_max_pixels(frames, media.min_pixels, media.max_pixels, factor) / factor**2
    most = -(-frames // FRAME_MULTIPLE) * max(1, int(of_frame))
    return most if media.video_tokens is None else min(most, media.video_tokens)


def _groups(samples: Sequence[Sample], shares_media: bool) -> Iterator[list[Sample]]:
    """Questions on the same media together, those on parts of one file behind each other."""

    def part(sample: Sample) -> tuple[str, tuple[MediaRef, ...]]:
        return cluster_of(sample), sample.media

    files: dict[str, int] = {}
    parts: dict[tuple[str, tuple[MediaRef, ...]], int] = {}
    for index, sample in enumerate(samples):
        files.setdefault(cluster_of(sample), index)
        parts.setdefault(part(sample), index)
    ordered = sorted(samples, key=lambda sample: (files[cluster_of(sample)], parts[part(sample)]))
    for _, group in groupby(ordered, part):
        questions = list(group)
        yield from [questions] if shares_media else ([sample] for sample in questions)


# ---- prefetch ----


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """Submits batches to a sampler, in order; a context manager, which cancels pending batches when something raises.

    Args:
        stop: makes the sampler raise; given for one that works in another process, which is called in a thread while
            the prompts of the next batch are made and outputs are read. None: it is called at once.
    """

    def __init__(self, sampler: Sampler, stop: Callable[[], None] | None):
        self._sampler, self._stop = sampler, stop
        self._thread = None if stop is None else ThreadPoolExecutor(1, "sampling")
        # Batches in flight while the next is made; their prompts are in memory.
        self.depth = 0 if stop is None else 1

    def submit(self, prompts: Sequence[Prompt], key: str) -> Callable[[], Sampled]:
        """Begin to sample. The returned function waits for the rollouts, and raises the sampler's exception."""
        if self._thread is not None:
            return self._thread.submit(self._sample, prompts, key).result
        sampled = self._sample(prompts, key)
        return lambda: sampled

    def _sample(self, prompts: Sequence[Prompt], key: str) -> Sampled:
        return self._sampler.generate(prompts, key), self._sampler.take_faults() or []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None or self._stop is None:
            return
        if error is not None:
            self._stop()
        self._thread.shutdown(cancel_futures=True)
