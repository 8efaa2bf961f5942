"""Answering the questions of evaluation sets, batch by batch, and reading the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import Meeting, gather_objects
from vlm_pg.eval.answer_files import AnswerFiles, Row
from vlm_pg.eval.batches import Prefetcher, SampledBatch, fault_of, split_finished
from vlm_pg.eval.contracts import Answered, Output, Reader, Reading
from vlm_pg.eval.eval_model import EvalModel
from vlm_pg.eval.eval_set import EvalSet, read_sets
from vlm_pg.eval.readers import reader_name, reader_of, strict_reading
from vlm_pg.observe.console import Console
from vlm_pg.rewards.parts import Response
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.types import BadSample, Prompt, Rollout, Sample

# (sample, its prompt, its index in its set) -> further keys of its row, for the report
DescribePrompt = Callable[[Sample, Prompt, int], Mapping[str, Any]]


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
        samplers = [self._model.sampler(item, self._config) for item in self.sets]
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
                faults = [fault_of(row) for row in rows if row["fault"] is not None]
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
        rows, batches = split_finished(self._model.batches(item, config, asking), finished)
        if rows:
            advance(rows)
        indices = {sample.sample_id: index for index, sample in enumerate(item.samples)}
        questions = {one.sample_id: _Question(one, indices[one.sample_id]) for batch in batches for one in batch}

        def finish(one: SampledBatch) -> None:
            for fault in one.faults:
                questions[fault.sample_id].fault = fault
            self._read(one.prompts, one.rollouts, questions, reader)
            if one.form + 1 == len(item.tampers):
                found = [questions.pop(sample.sample_id).to_row() for sample in batches[one.number]]
                files.append(item.name, found)
                rows.extend(found)
                advance(found)

        with Prefetcher(sampler, self._model.stop_requests) as prefetcher:
            prefetcher.run(batches, source, f"eval/{item.name}", finish, item.tampers, self._should_stop)
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
