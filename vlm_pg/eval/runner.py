"""Answering the questions of evaluation sets and scoring the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.records import read_records
from vlm_pg.distributed import ALONE, RankLayout, gather_objects
from vlm_pg.eval.scoring import Scored, summarize
from vlm_pg.eval.settings import Control
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.controls import repeat_frame, shuffle_frames
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.prompts.prompt_source import Tamper
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.rewards.response import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import BadSample, Prompt, RolloutGroup, Sample

# A question of a control is asked once with each of these; its accuracy is their mean.
TAMPERS: dict[Control, tuple[Tamper, ...]] = {
    "frames_shuffled": (shuffle_frames,),
    "frame_repeated": tuple(partial(repeat_frame, turn=turn, turns=4) for turn in range(4)),
}


@dataclass(frozen=True)
class EvalSet:
    """One set of questions, or a control on it. ``name`` is what results are reported under."""

    name: str
    records: Path
    samples: tuple[Sample, ...]
    kind: str = "eval"
    tampers: tuple[Tamper | None, ...] = (None,)


@dataclass(frozen=True)
class _Answers:
    """What one rank has to say of a set; the questions' pixels are not kept."""

    rows: list[dict[str, Any]]
    scored: list[Scored]
    bad: list[BadSample]


@dataclass(frozen=True)
class Examinee:
    """A policy, and what its answers take: prompts made and rewards given as in training.

    ``ranks``: questions are dealt out to them in turn. ``weights_at_hand``: entered around sampling.
    """

    policy: Policy
    sources: SourcePool
    rewarder: Rewarder
    ranks: RankLayout = ALONE
    weights_at_hand: Callable[[], AbstractContextManager[None]] = nullcontext
    should_stop: Callable[[], bool] = lambda: False


class Evaluator:
    """Runs all evaluation sets of a configuration against one policy, wherever its weights are by then.

    Args:
        bad_log: where records and questions that cannot be used are written, on the first rank.
    """

    def __init__(self, config: RunConfig, examinee: Examinee, console: Console, bad_log: BadSampleLog | None):
        self._config, self._console, self._bad_log = config, console, bad_log
        self._policy, self._sources, self._rewarder = examinee.policy, examinee.sources, examinee.rewarder
        self._ranks, self._weights_at_hand = examinee.ranks, examinee.weights_at_hand
        self._should_stop = examinee.should_stop
        self.sets = self._read_sets()
        rollout = config.rollout.model_copy(
            update={
                "num_generations": config.eval.num_generations,
                "temperature": config.eval.temperature,
                "top_p": config.eval.top_p,
                "top_k": 0,
            }
        )
        self._sampler: Sampler = RolloutEngine(self._policy, rollout, config.run.seed, self._should_stop)
        self._per_batch = max(1, rollout.max_batch_rollouts // rollout.num_generations)

    def _read_sets(self) -> list[EvalSet]:
        sets = []
        settings, files = self._config.eval, self._config.data.eval
        for key, names in (
            ("eval.control_sets", settings.control_sets),
            ("eval.headline_set", [settings.headline_set]),
        ):
            left_out = [name for name in names or () if name is not None and name not in settings.chosen_sets([name])]
            if left_out:
                self._console.info(f"{key}: {', '.join(left_out)} is left out by eval.sets={list(settings.sets or ())}")
        for name in settings.chosen_sets(list(files)):
            records = files[name]
            samples, bad = read_records(records)
            if self._bad_log is not None:
                self._bad_log.record_file(bad, len(samples) + len(bad))
            chosen = tuple(samples[: settings.limit])
            self._policy.check_samples(chosen, records)
            sets.append(EvalSet(name, records, chosen))
            if not settings.controls or not settings.is_controlled(name):
                continue
            if any(ref.kind == "video" for sample in chosen for ref in sample.media):
                sets += [
                    EvalSet(f"{name} ({control})", records, chosen, "control", TAMPERS[control])
                    for control in settings.controls
                ]
            else:
                self._console.info(f"eval.controls: not run on {name}, which has no video whose frames could be moved")
        return sets

    def run(self, tag: str, folder: Path | None) -> dict[str, Any]:
        """Evaluate every set: the headline figures, and those of each set under ``sets``.

        Args:
            tag: e.g. "before"; answers go to ``eval_<set>_<tag>.jsonl`` in ``folder`` (None: not written).
        """
        results: dict[str, Any] = {}
        total = sum(len(item.samples) for item in self.sets)
        with self._console.progress(f"evaluating {tag}", total) as bar, self._weights_at_hand():
            # Ranks are at their own pace here: what they found is gathered afterwards.
            mine = [
                self._answers_of(item, lambda tried: bar.advance(tried * self._ranks.world_size)) for item in self.sets
            ]
        for item, found in zip(self.sets, mine, strict=True):
            everywhere = gather_objects(found)
            if item.kind == "eval" and self._bad_log is not None:
                # A control shows the same files again; its faults are the set's own.
                self._bad_log.record_tried(len(item.samples), [fault for part in everywhere for fault in part.bad])
            scored = [one for part in everywhere for one in part.scored]
            results[item.name] = summarize(scored, item.kind)
            results[item.name]["n_bad_media"] = len(item.samples) - len(scored)
            if folder is not None and self._ranks.is_first:
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for part in everywhere for row in part.rows]
                write_bytes_atomic(folder / f"eval_{_file_name(item.name)}_{tag}.jsonl", "".join(lines).encode())
        headline = next((name for name in (self._config.eval.headline_set, *results) if name in results), None)
        chosen = results[headline] if headline is not None else {"accuracy": None, "n": 0}
        return {"accuracy": chosen["accuracy"], "n": chosen["n"], "headline_set": headline, "sets": results}

    def _answers_of(self, item: EvalSet, advance: Callable[[int], None]) -> _Answers:
        answers = _Answers([], [], [])
        for groups, bad, tried in self._answer(item):
            answers.rows.extend(_row(group) for group in groups)
            answers.scored.extend(Scored.of(group) for group in groups)
            answers.bad.extend(bad)
            advance(tried)
        return answers

    def _answer(self, item: EvalSet) -> Iterator[tuple[list[RolloutGroup], list[BadSample], int]]:
        """Batch by batch: answered and scored questions, those that could not be used, how many were tried."""
        source = self._sources.for_records(item.records, item.name)
        mine = item.samples[self._ranks.rank :: self._ranks.world_size]
        batches = [mine[i : i + self._per_batch] for i in range(0, len(mine), self._per_batch)]
        for index, batch in enumerate(batches):
            if index + 1 < len(batches):
                source.prefetch(batches[index + 1])
            groups: dict[str, RolloutGroup] = {}
            bad: list[BadSample] = []
            for number, tamper in enumerate(item.tampers):
                questions, faults = source.load(batch, tamper, self._should_stop)
                bad.extend(faults)
                for group in self._ask(questions, f"{item.name}/{number}"):
                    earlier = groups.get(group.sample.sample_id)
                    groups[group.sample.sample_id] = group if earlier is None else _joined(earlier, group)
            yield list(groups.values()), bad, len(batch)

    def _ask(self, questions: Sequence[tuple[Sample, Prompt]], name: str) -> list[RolloutGroup]:
        """Answers and their rewards; ``name`` keys the random numbers beside the sample's id."""
        rollouts = self._sampler.generate([prompt for _, prompt in questions], f"eval/{name}")
        responses = [
            Response(sample, answer.text, len(answer.token_ids))
            for (sample, _), answers in zip(questions, rollouts, strict=True)
            for answer in answers
        ]
        rewards = iter(self._rewarder.score(responses, self._should_stop))
        return [
            RolloutGroup(
                sample, prompt, answers, self._policy.weights_version, rewards=tuple(next(rewards) for _ in answers)
            )
            for (sample, prompt), answers in zip(questions, rollouts, strict=True)
        ]


def _joined(first: RolloutGroup, second: RolloutGroup) -> RolloutGroup:
    return replace(first, rollouts=first.rollouts + second.rollouts, rewards=first.rewards + second.rewards)


def table(results: dict[str, Any]) -> list[str]:
    """Lines for the console: one a set, categories indented."""
    lines = []
    for name, figures in results["sets"].items():
        lines.append(_line(name, figures))
        if len(figures["by_category"]) > 1:
            lines += [f"    {_line(category, part)}" for category, part in figures["by_category"].items()]
    return lines


def _line(name: str, figures: dict[str, Any]) -> str:
    if figures["accuracy"] is None:
        return f"{name}: no question could be scored"
    text = f"{name}: accuracy {figures['accuracy']:.3f}"
    if figures.get("standard_error") is not None:
        text += f" ± {figures['standard_error']:.3f}"
    text += f" (n {figures['n']}"
    if figures.get("chance") is not None:
        text += f", chance {figures['chance']:.2f}"
    if figures.get("format_rate") is not None:
        text += f", format {figures['format_rate']:.2f}"
    if figures.get("n_no_value"):
        text += f", {figures['n_no_value']} without a value"
    if figures.get("n_bad_media"):
        text += f", {figures['n_bad_media']} unusable"
    passes = figures.get("pass_at_k", {})
    text += "".join(f", pass@{k} {value:.3f}" for k, value in passes.items() if k != "1" and value is not None)
    return text + ")"


def _row(group: RolloutGroup) -> dict[str, Any]:
    sample = group.sample
    return {
        "sample_id": sample.sample_id,
        "category": sample.category,
        "question": sample.question,
        "options": list(sample.options),
        "gold": sample.answer,
        "responses": [
            {
                "text": rollout.text,
                "parts": dict(reward.parts),
                "notes": dict(reward.notes),
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.token_ids),
            }
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ],
    }


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name).strip("_")
