"""Ours: what ``vlm-pg eval`` runs, from records to answers on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from vlm_pg.answers.whole import WholeReader
from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import set_attention
from vlm_pg.bench.evaluation.case import SET, EvalCase
from vlm_pg.config import RunConfig
from vlm_pg.data.records import read_records
from vlm_pg.eval.answer_files import AnswerFiles, answers_path, read_answers
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.runner import Evaluator, Examinee
from vlm_pg.media.loader import MediaLoader
from vlm_pg.observe.console import Console
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import Prompt, Sample


@contextmanager
def _session(case: EvalCase, asks_apart: bool) -> Iterator[_Ours]:
    set_attention(case, ATTENTION_NAME)
    case.policy.vision.forget()  # an evaluation begins without features
    yield _Ours(case, asks_apart)


class _Ours:
    def __init__(self, case: EvalCase, asks_apart: bool):
        self._case, self.asks_apart = case, asks_apart
        self._config = case.config(asks_apart)

    def media(self) -> None:
        case, config = self._case, self._config
        refs = dict.fromkeys(ref for sample in self._samples(config) for ref in sample.media)
        with MediaLoader(config.media, case.folder, factor=case.policy.pixel_factor) as loader:
            for found in loader.load(list(refs)):
                if isinstance(found, Exception):
                    raise found

    def evaluate(self) -> None:
        self._answers(self._config)

    def greedy(self) -> torch.Tensor:
        """By the engine, whose words must be those that the evaluation wrote."""
        case, config = self._case, self._case.config(self.asks_apart, greedy=True)
        rollout = config.rollout.model_copy(update={"num_generations": 1, "temperature": 0.0})
        engine = RolloutEngine(case.policy, rollout, config.run.seed)
        rollouts = [one for (one,) in engine.generate(self.prompts(), "bench")]
        written = [row.outputs[0].text for row in self._answers(config)]
        if written != [rollout.text for rollout in rollouts]:
            raise RuntimeError(
                "The evaluation's greedy answers are not those of the rollout engine on the same prompts. Nothing was "
                "timed: please report this."
            )
        return torch.stack([rollout.token_ids for rollout in rollouts])

    def prompts(self) -> list[Prompt]:
        config = self._config
        with self._case.sources(config) as sources:
            prompts, faults = sources.for_records(config.data.eval[SET]).load(self._samples(config))
        if faults:
            raise RuntimeError(f"A clip of the measurement's own cannot be read: {faults[0]}")
        return [prompt for _, prompt in prompts]

    def _samples(self, config: RunConfig) -> list[Sample]:
        return read_records(config.data.eval[SET])[0]

    def _answers(self, config: RunConfig) -> list[Answered]:
        """Evaluate into a folder of its own below the clips, which goes with them, even if this process is killed."""
        case = self._case
        with (
            tempfile.TemporaryDirectory(prefix="answers_", dir=case.folder) as folder,
            case.sources(config) as sources,
            Rewarder(config.reward) as rewarder,
            WholeReader(config.reward) as whole,
        ):
            examinee = Examinee(case.policy, sources, rewarder, whole)
            evaluator = Evaluator(config, examinee, Console(enabled=False), None)
            evaluator.run("bench", AnswerFiles(Path(folder), 0))
            return read_answers(answers_path(Path(folder), SET))


together, apart = partial(_session, asks_apart=False), partial(_session, asks_apart=True)
