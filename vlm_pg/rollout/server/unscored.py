"""Answers of a server as they are: an evaluation learns nothing from them, and has no weights to score them with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vlm_pg.errors import SampleError
from vlm_pg.rollout.server.errors import AnswerError
from vlm_pg.rollout.server.respondent import Respondent
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, Rollout


class UnscoredAnswers:
    """A ``Sampler`` whose ``rollout_logprobs`` are NaN: nobody here knows them.

    A prompt that this kind of server cannot be given as it is (``video_for_server``) is a fault like an answer that
    does not fit: it says something of that question alone.
    """

    scores_itself = False

    def __init__(self, respondent: Respondent):
        self._respondent = respondent
        self._unfit: list[BadSample] = []

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one that has no usable ones (``take_faults``).

        Raises:
            ServerError: the server is away, refuses, read another prompt, or gave nothing that fits for many questions
                in a row.
            InterruptedError: a stop was asked for.
        """
        fitting = [prompt for prompt in prompts if self._fits(prompt)]
        said = iter(self._respondent.ask(fitting, step))
        known = {id(prompt) for prompt in fitting}
        found: list[tuple[Rollout, ...]] = []
        for prompt in prompts:
            answers = next(said) if id(prompt) in known else []
            if isinstance(answers, AnswerError):
                answers = []
            ids = [torch.tensor(answer.token_ids) for answer in answers]
            found.append(
                tuple(
                    Rollout(tokens, torch.full((len(tokens),), torch.nan), answer.finish_reason, answer.text)
                    for tokens, answer in zip(ids, answers, strict=True)
                )
            )
        return found

    def take_faults(self) -> list[BadSample]:
        """Questions since the last call that have no usable rollouts, and why."""
        unfit, self._unfit = self._unfit, []
        return [*unfit, *self._respondent.take_faults()]

    def report(self, tally: Tally) -> None:
        """Nothing: an evaluation counts its questions itself."""

    def use_checkpoint(self, checkpoint: Path) -> None:
        """Name this checkpoint from now on; only for a server that loads by name."""
        self._respondent.use_checkpoint(checkpoint)

    def _fits(self, prompt: Prompt) -> bool:
        try:
            self._respondent.check_prompt(prompt)
        except SampleError as error:
            self._unfit.append(BadSample(prompt.sample_id, error.reason, str(error), "rollout.engine=server"))
            return False
        return True
