"""``vlm-pg sample``: rollouts of the training records with their rewards, for ``vlm-pg select`` and data.difficulty.

parts/            rows so far, block by block of the data order, while it is unfinished
samples.jsonl     all rows in data order (``data/sampled.py``)
protocol.json     what they depend on
bad_samples.jsonl records that could not be used
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.sample_sets import first_of_each, open_training, refuse_empty, used_samples
from vlm_pg.data.sampled import SAMPLES, SampledFile, parsed_sample_row
from vlm_pg.distributed import Meeting, RankLayout, gather_objects
from vlm_pg.errors import ConfigError
from vlm_pg.eval.answer_files import AnswerFiles, Row
from vlm_pg.eval.batches import Prefetcher, SampledBatch, fault_of, split_finished
from vlm_pg.eval.eval_model import EvalModel, joined_ranks, open_policy, opened_model
from vlm_pg.eval.eval_set import EvalSet
from vlm_pg.eval.record import PROTOCOL, ResultKind, differences, prepare_folder, read_record, sampling_record
from vlm_pg.files import json_line, replacing
from vlm_pg.observe.console import Console
from vlm_pg.observe.run_lock import RunLock
from vlm_pg.rewards.parts import THINK_OPEN, Response
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import BadSample, Prompt, RewardBreakdown, Rollout, Sample

# Ranks wait for each other at the end of a block; its rows are in memory.
BLOCK_QUESTIONS = 8192
_PARTS = "parts"
_KIND = ResultKind("sampling run", SAMPLES, f"{_PARTS}/*", "give another folder (--out)")
# Keys of rows in parts that ``samples.jsonl`` has not.
_OF_PARTS = ("sample_id", "where", "trace")


@dataclass(frozen=True)
class TrainingBlock(EvalSet):
    """Training records, sampled as in training."""

    def rollout(self, config: RunConfig) -> RolloutSettings:
        """See ``EvalSet``."""
        return config.rollout


def sample(config: RunConfig, out: Path | None) -> None:
    """Sample ``rollout.num_generations`` responses to each training record and score them.

    A finished folder is left as it is, an unfinished one continued. Processes started by a launcher share the records.

    Args:
        out: folder of the rows; None: ``samples`` in the run's folder.

    Raises:
        ConfigError: there are no training records, or an unfinished sampling run in the folder had another protocol.
        ServerError: the server does not answer, is of no known kind, or does not support the request.
        TooManyBadSamples: more than ``data.max_bad_share`` of the records could not be used.
    """
    if not config.data.train_sets:
        raise ConfigError("data.train is not set. Sampling needs a file of prepared records. Set data.train=PATH.")
    with joined_ranks(config) as ranks:
        _sample(config, Path(config.run.dir) / "samples" if out is None else out, ranks)


def _sample(config: RunConfig, folder: Path, ranks: RankLayout) -> None:
    console, data = Console(enabled=ranks.is_rank0), config.data
    found, bad = open_training(data)
    refuse_empty(found, data, f"{len(bad)} are bad{f', the first: {bad[0]}' if bad else ''}")
    samples = used_samples(first_of_each(found, data.limit), data.mixture)
    console.info(*data.left_out(), f"data: {len(samples):,} questions from {data.train_shown}")
    with ExitStack() as stack:
        policy, server = open_policy(config, Path(config.model.path), console)
        policy.check_samples(samples, data.train_shown)
        asked = [TrainingBlock("train", Path(data.train_shown), ())]
        record = sampling_record(config, policy, None if server is None else server.record(asked))

        def prepared() -> bool:
            """Whether it is finished already."""
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(RunLock.take(folder, console.info).release)
            if is_finished(folder, record):
                return True
            prepare_folder(folder, record, "auto", console.info, _KIND)
            return False

        if ranks.from_rank0(prepared):
            console.info(f"{folder} is finished; remove it, or give another folder (--out), to sample anew")
        else:
            parts = folder / _PARTS
            parts.mkdir(parents=True, exist_ok=True)
            log = None
            if ranks.is_rank0:
                if any(parts.iterdir()):
                    console.info("going on: questions were sampled before")
                most, least_seen = data.max_bad_share, data.min_seen_for_bad_share
                log = BadSampleLog(folder / "bad_samples.jsonl", most, least_seen, console.warn)
                log.record_file(bad, len(found) + len(bad))
            with opened_model(config, policy, server, ranks, console) as model:
                names = _Sampling(config, model, console, log, parts).run(samples)
            if ranks.is_rank0:
                _join([parts / f"{name}.jsonl" for name in names], folder / SAMPLES)
                shutil.rmtree(parts)
        if ranks.is_rank0:
            console.info(summary(folder / SAMPLES))


class _Sampling:
    """Samples records block by block, each rank its batches of a block."""

    def __init__(
        self, config: RunConfig, model: EvalModel, console: Console, bad_log: BadSampleLog | None, parts: Path
    ):
        self._config, self._model, self._console, self._bad_log = config, model, console, bad_log
        self._files = AnswerFiles(parts, model.ranks.rank, prefix="", parse=_parsed_part)
        self._source = model.sources.for_training()

    def run(self, samples: Sequence[Sample]) -> list[str]:
        """Sample all records; the names of the blocks, whose files rank 0 has then."""
        names, total = list[str](), len(samples)
        correct: list[float] = []
        with self._console.progress("sampling", total) as bar:

            def advance(rows: Sequence[Row]) -> None:
                correct.extend(row["p_correct"] for row in rows if row["p_correct"] is not None)
                note = f"accuracy {sum(correct) / len(correct):.3f}" if correct else ""
                bar.advance(min(len(rows) * self._model.ranks.world_size, total - bar.done), note)

            for start in range(0, total, BLOCK_QUESTIONS):
                names.append(f"block-{start // BLOCK_QUESTIONS:05d}")
                records = Path(self._config.data.train_shown)
                block = TrainingBlock(names[-1], records, tuple(samples[start : start + BLOCK_QUESTIONS]))
                self._run_block(block, advance)
        return names

    def _run_block(self, block: TrainingBlock, advance: Callable[[Sequence[Row]], None]) -> None:
        # All ranks read before any of them writes.
        finished = gather_objects(self._files.finished_rows(block.name))[0]
        rows, batches = split_finished(self._model.batches(block, self._config), finished)
        if rows:
            advance(rows)

        def finish(one: SampledBatch) -> None:
            found = self._rows(batches[one.number], one)
            self._files.append(block.name, found)
            rows.extend(found)
            advance(found)
            self._record(found)

        if batches:
            sampler = self._model.sampler(block, self._config)
            with Prefetcher(sampler, self._model.stop_requests) as prefetcher:
                prefetcher.run(batches, self._source, "sample", finish)
        Meeting().wait()
        of_ranks = gather_objects(rows)
        if self._model.ranks.is_rank0:
            for of_rank in of_ranks[1:]:
                self._record(of_rank)
            by_id = {row["sample_id"]: row for of_rank in of_ranks for row in of_rank}
            self._files.complete(block.name, [by_id[sample.sample_id] for sample in block.samples])

    def _record(self, rows: Sequence[Row]) -> None:
        if self._bad_log is not None:
            self._bad_log.record_tried(len(rows), [fault_of(row) for row in rows if row["fault"] is not None])

    def _rows(self, batch: Sequence[Sample], one: SampledBatch) -> list[Row]:
        """The rows of a batch's records, with rewards."""
        flat = [
            Response(sample, rollout.text, len(rollout.token_ids))
            for (sample, _), rollouts in zip(one.prompts, one.rollouts, strict=True)
            for rollout in rollouts
        ]
        rewards = iter(self._model.rewarder.score(flat))
        rows = {fault.sample_id: _row_of_fault(fault) for fault in one.faults}
        for (sample, prompt), rollouts in zip(one.prompts, one.rollouts, strict=True):
            if rollouts:
                rows[sample.sample_id] = _row(prompt, [(rollout, next(rewards)) for rollout in rollouts])
        return [_names(sample) | rows[sample.sample_id] for sample in batch]


def _names(sample: Sample) -> Row:
    own = {"sample_id": sample.sample_id, "problem_id": sample.sample_id.removeprefix(f"{sample.dataset}/")}
    return own | ({"dataset": sample.dataset} if sample.dataset else {})


def _row(prompt: Prompt, responses: Sequence[tuple[Rollout, RewardBreakdown]]) -> Row:
    written: list[dict[str, Any]] = [
        {
            "text": rollout.text,
            "tokens": len(rollout.token_ids),
            "finish_reason": rollout.finish_reason,
            "accuracy": reward.parts["accuracy"],
            "reward": reward.total,
            "parts": dict(reward.parts),
        }
        for rollout, reward in responses
    ]
    values = [one["accuracy"] for one in written if one["accuracy"] is not None]
    begun = prompt.text.rstrip()
    opened = prompt.text[len(begun) - len(THINK_OPEN) :] if begun.endswith(THINK_OPEN) else ""
    return {
        "p_correct": sum(values) / len(values) if values else None,
        **({"opened": opened} if opened else {}),
        "responses": written,
        "fault": None,
    }


def _row_of_fault(bad: BadSample) -> Row:
    fault = [bad.reason, bad.message]
    return {"p_correct": None, "responses": [], "fault": fault, "where": bad.where, "trace": bad.trace}


def _parsed_part(line: bytes) -> Row | None:
    row = parsed_sample_row(line)
    return row if row is not None and "sample_id" in row and "fault" in row else None


def is_finished(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether the folder has all samples under this record."""
    if not (folder / SAMPLES).is_file() or not (folder / PROTOCOL).is_file():
        return False
    return not differences(read_record(folder / PROTOCOL)["decides"], record["decides"])


def _join(blocks: Sequence[Path], path: Path) -> None:
    with replacing(path) as file:
        for row in (json.loads(line) for block in blocks for line in block.read_bytes().splitlines()):
            left_out = _OF_PARTS if row["fault"] is not None else (*_OF_PARTS, "fault")
            file.write(json_line({key: value for key, value in row.items() if key not in left_out}))


def summary(path: Path) -> str:
    """The line about a finished file."""
    values = list(SampledFile(path).p_correct.values())
    known = [value for value in values if value is not None]
    right, wrong = sum(value == 1 for value in known), sum(value == 0 for value in known)
    mean = f"{sum(known) / len(known):.3f}" if known else "none"
    return (
        f"{path}: {len(values):,} questions, mean accuracy {mean}; all right {right:,}, all wrong {wrong:,}, mixed "
        f"{len(known) - right - wrong:,}, without a value {len(values) - len(known):,}"
    )
