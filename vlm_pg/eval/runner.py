"""Answering the questions of evaluation sets and reading the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import SINGLE_RANK, Meeting, RankLayout, gather_objects
from vlm_pg.eval.answer_files import AnswerFiles, Row
from vlm_pg.eval.batches import batches_of, most_visual_tokens
from vlm_pg.eval.contracts import Answered, Output, Reader, Reading
from vlm_pg.eval.eval_set import EvalSet, read_sets
from vlm_pg.eval.figures import check_details, figures_of
from vlm_pg.eval.prefetch import Prefetcher, Sampled
from vlm_pg.eval.readers import reader_name, reader_of
from vlm_pg.eval.strict import strict_reading
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import BadSample, Prompt, Rollout, Sample

if TYPE_CHECKING:
    from vlm_pg.answers.whole import WholeReader

# Batches are dealt to ranks whole, so that what is computed together is the same for any number of them.
MOST_QUESTIONS_A_BATCH = 32

# (sample, its prompt, its place in its set) -> further keys of its row, for whoever looks at it
Showing = Callable[[Sample, Prompt, int], Mapping[str, Any]]


@dataclass
class _Question:
    """What has come of one question so far: its outputs to all tampered forms, or its fault. ``place``: in its set."""

    sample: Sample
    place: int
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
class _UnderWay:
    """Prompts of a batch that a sampler has been given. ``is_last``: no other form of its questions follows."""

    prompts: Sequence[tuple[Sample, Prompt]]
    questions: Mapping[str, _Question]
    sampled: Callable[[], Sampled]
    is_last: bool


@dataclass(frozen=True)
class EvalModel:
    """A policy, and what its answers take: prompts made and rewards given as in training.

    ``whole``: reads whole outputs. ``ranks``: take batches of questions round-robin. ``gathered_parameters``: entered
    around sampling. ``sampler_of``: who answers the questions of a set; None: the policy itself, which must
    have its weights then. ``stop_asking``: of samplers that work elsewhere, and are asked while the next prompts are
    made: ends that.
    """

    policy: Policy | WeightlessPolicy
    sources: SourcePool
    rewarder: Rewarder
    whole: WholeReader
    ranks: RankLayout = SINGLE_RANK
    gathered_parameters: Callable[[], AbstractContextManager[None]] = nullcontext
    should_stop: Callable[[], bool] = lambda: False
    sampler_of: Callable[[EvalSet], Sampler] | None = None
    stop_asking: Callable[[], None] | None = None


class Evaluator:
    """Runs all evaluation sets of a configuration against one policy, wherever its weights are by then.

    Args:
        bad_log: where records and questions that cannot be used are written, on the first rank.
        showing: what else a question's row is to hold.
    """

    def __init__(
        self,
        config: RunConfig,
        eval_model: EvalModel,
        console: Console,
        bad_log: BadSampleLog | None,
        showing: Showing = lambda sample, prompt, place: {},
    ):
        self._config, self._console, self._bad_log, self._showing = config, console, bad_log, showing
        self._policy, self._sources, self._rewarder = eval_model.policy, eval_model.sources, eval_model.rewarder
        self._ranks, self._weights_at_hand = eval_model.ranks, eval_model.gathered_parameters
        self._whole, self._should_stop, self._sampler_of = (
            eval_model.whole,
            eval_model.should_stop,
            eval_model.sampler_of,
        )
        self._stop_asking = eval_model.stop_asking
        self._recorded: set[str] = set()
        self.sets = read_sets(config, self._policy, console, bad_log)
        for item in self.sets:
            reader_of(reader_name(config.eval.reader, item.protocol), item.protocol, self._whole)
            check_details(item)

    def run(self, tag: str, files: AnswerFiles) -> dict[str, Any]:
        """Evaluate every set: the headline figures, and those of each set under ``sets``.

        Questions that ``files`` holds from an evaluation that did not come to its end are not asked again. The answers
        of each set go there, in the order of its records.

        Args:
            tag: e.g. "before", for the progress that is shown.
        """
        # All have looked before any begins to write.
        kept = gather_objects({item.name: files.kept(item.name) for item in self.sets})[0]
        if done := sum(map(len, kept.values())):
            self._console.info(f"going on: {done:,} question(s) were answered before")
        # All sets' before any is asked: what cannot be sampled so shows at once.
        samplers = [self._sampler(item) for item in self.sets]
        results: dict[str, Any] = {}
        total = sum(len(item.samples) for item in self.sets)
        with self._console.progress(f"evaluating {tag}", total) as bar, self._weights_at_hand():
            # Ranks are at their own pace here: what they found is gathered afterwards.
            mine = []
            for item, sampler in zip(self.sets, samplers, strict=True):
                running = _RunningAccuracy()

                def advance(rows: list[Row], running: _RunningAccuracy = running) -> None:
                    running.add(rows)
                    bar.advance(min(len(rows) * self._ranks.world_size, total - bar.done), str(running))

                mine.append(self._rows_of(item, sampler, kept[item.name], files, advance))
        # Behind the block: where weights are gathered in turns, a rank that is done helps the others to its end.
        Meeting().wait(self._should_stop)
        for item, found in zip(self.sets, mine, strict=True):
            rows = _in_order(item, [row for part in gather_objects(found) for row in part])
            if item.kind == "eval" and self._bad_log is not None and item.name not in self._recorded:
                # A control shows the same files again, and so does the next evaluation; its faults are the set's own.
                self._recorded.add(item.name)
                faults = [_fault(row) for row in rows if row["fault"] is not None]
                self._bad_log.record_tried(len(item.samples), faults)
            if self._ranks.is_rank0:
                files.complete(item.name, rows)
            formats = [value for row in rows for value in row.get("formats", ())]
            reader = reader_name(self._config.eval.reader, item.protocol)
            results[item.name] = figures_of(item, [Answered.from_row(row) for row in rows], reader, formats)
        headline = next((name for name in (self._config.eval.headline_set, *results) if name in results), None)
        chosen = results[headline] if headline is not None else {"accuracy": None, "n": 0}
        return {"accuracy": chosen["accuracy"], "n": chosen["n"], "headline_set": headline, "sets": results}

    def _sampler(self, item: EvalSet) -> Sampler:
        if self._sampler_of is not None:
            return self._sampler_of(item)
        assert isinstance(self._policy, Policy)
        config = self._config
        return RolloutEngine(self._policy, item.rollout(config), item.seed(config), self._should_stop)

    def _batches(self, item: EvalSet, media: MediaSettings) -> list[list[Sample]]:
        """The questions that this rank asks, those together that are asked together."""
        rollout = item.rollout(self._config)
        size = min(max(1, rollout.max_batch_rollouts // rollout.num_generations), MOST_QUESTIONS_A_BATCH)
        if self._stop_asking is not None:
            # Whose answers do not depend on what is asked together: enough to keep all its requests in flight.
            at_once = rollout.server.concurrency
            size = max(at_once, min(2 * at_once, MOST_QUESTIONS_A_BATCH))
        tokens_of = partial(most_visual_tokens, media=media, factor=self._policy.pixel_factor)
        batches = batches_of(item.samples, size, tokens_of, shares_media=item.tampers == (None,))
        return batches[self._ranks.rank :: self._ranks.world_size]

    def _rows_of(
        self,
        item: EvalSet,
        sampler: Sampler,
        kept: Mapping[str, Row],
        files: AnswerFiles,
        advance: Callable[[list[Row]], None],
    ) -> list[Row]:
        """The rows of this rank's batches; what is answered now is also appended to its part."""
        config, policy = self._config, self._policy
        asking = item.asking(config, policy)
        source = self._sources.for_records(item.records, item.name, options=asking)
        reader = reader_of(reader_name(config.eval.reader, item.protocol), item.protocol, self._whole)
        mine = self._batches(item, config.media if asking is None else asking.media)
        rows: list[Row] = []
        places = {sample.sample_id: place for place, sample in enumerate(item.samples)}
        # A batch that was cut off is asked whole: what is computed together stays the same. So is one with a fault,
        # which may have been put right since.
        open_batches = []
        for batch in mine:
            found = [kept[sample.sample_id] for sample in batch if sample.sample_id in kept]
            if len(found) == len(batch) and all(row["fault"] is None for row in found):
                rows += found
            else:
                open_batches.append(batch)
        if rows:
            advance(rows)
        under_way: deque[_UnderWay] = deque()

        def finish(one: _UnderWay) -> None:
            rollouts, faults = one.sampled()
            for fault in faults:
                one.questions[fault.sample_id].fault = fault
            self._read(one.prompts, rollouts, one.questions, reader)
            if one.is_last:
                found = [question.to_row() for question in one.questions.values()]
                files.append(item.name, found)
                rows.extend(found)
                advance(found)

        with Prefetcher(sampler, self._stop_asking) as ahead:
            for index, batch in enumerate(open_batches):
                following = open_batches[index + 1] if index + 1 < len(open_batches) else None
                questions = {sample.sample_id: _Question(sample, places[sample.sample_id]) for sample in batch}
                if following is not None:
                    source.prefetch([*batch, *following])
                for number, tamper in enumerate(item.tampers):
                    prompts, faults = source.load(batch, tamper, self._should_stop)
                    for fault in faults:
                        questions[fault.sample_id].fault = fault
                    sampled = ahead.ask([prompt for _, prompt in prompts], f"eval/{item.name}/{number}")
                    is_last = number + 1 == len(item.tampers)
                    under_way.append(_UnderWay(prompts, questions, sampled, is_last))
                    del prompts, sampled  # their pixels go before those of others come
                    while len(under_way) > ahead.batches:
                        finish(under_way.popleft())
            while under_way:
                finish(under_way.popleft())
        return rows

    def _read(
        self,
        prompts: Sequence[tuple[Sample, Prompt]],
        rollouts: Sequence[tuple[Rollout, ...]],
        questions: Mapping[str, _Question],
        reader: Reader | None,
    ) -> None:
        """Add answers, what was read in them and what that is worth."""
        pairs = [(sample, answer) for (sample, _), each in zip(prompts, rollouts, strict=True) for answer in each]
        readings = self._strict(pairs) if reader is None else self._whole_readings(pairs, reader)
        for sample, prompt in prompts:
            question = questions[sample.sample_id]
            question.shown = question.shown or self._showing(sample, prompt, question.place)
        for (sample, answer), (reading, has_format) in zip(pairs, readings, strict=True):
            question = questions[sample.sample_id]
            question.outputs.append(Output(answer.text, reading, answer.finish_reason, len(answer.token_ids)))
            question.formats.append(has_format)

    def _strict(self, pairs: Sequence[tuple[Sample, Rollout]]) -> list[tuple[Reading, float | None]]:
        """By training's reward, and whether each output has the format that it wants."""
        responses = [Response(sample, answer.text, len(answer.token_ids)) for sample, answer in pairs]
        rewards = self._rewarder.score(responses, self._should_stop)
        settings = self._config.reward
        return [
            (strict_reading(sample, answer.text, reward, settings), reward.parts.get("format"))
            for (sample, answer), reward in zip(pairs, rewards, strict=True)
        ]

    def _whole_readings(
        self, pairs: Sequence[tuple[Sample, Rollout]], reader: Reader
    ) -> list[tuple[Reading, float | None]]:
        """Of whole outputs, of which no format is wanted."""
        found: list[tuple[Reading, float | None]] = []
        for sample, answer in pairs:
            if self._should_stop():
                raise InterruptedError("stopped while answers were read")
            found.append((reader(sample, answer.text, answer.finish_reason == "length"), None))
        return found


class _RunningAccuracy:
    """Of the questions answered so far on this rank, for the progress line."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            score = Answered.from_row(row).score
            if score is not None:
                self._sum, self._count = self._sum + score, self._count + 1

    def __str__(self) -> str:
        return f"accuracy {self._sum / self._count:.3f}" if self._count else ""


def _in_order(item: EvalSet, rows: Sequence[Row]) -> list[Row]:
    by_id = {row["sample_id"]: row for row in rows}
    return [by_id[sample.sample_id] for sample in item.samples]


def _fault(row: Row) -> BadSample:
    reason, message = row["fault"]
    return BadSample(row["sample_id"], reason, message, row["where"], row["trace"])
