"""Reading whole outputs as a careful human would: published evaluation prompts ask for no answer tags.

``WholeReader`` sends each kind of answer to its reader.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from vlm_pg.answers.grading import PREPARE
from vlm_pg.answers.pool import CheckerPool
from vlm_pg.answers.verdict import Verdict
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.box import read_box
from vlm_pg.eval.reading.choice import read_choice, read_choices
from vlm_pg.eval.reading.mathematics import grade_in, read_mathematics
from vlm_pg.eval.reading.number import read_number
from vlm_pg.eval.reading.span import read_span
from vlm_pg.eval.reading.text import read_text
from vlm_pg.eval.reading.thinking import Said, said_in
from vlm_pg.eval.reading.yes_no import read_yes_no
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

_NOTHING = Said("", None, False)
_Reader = Callable[[Sample, Said], Reading]


class WholeReader(AbstractContextManager["WholeReader"]):
    """What whole outputs answer, and what that is worth; a context manager, to be closed when no more come.

    Mathematics are compared in processes of their own, which start with the first of them.

    Args:
        settings: tolerances of rewards' checkers, and the checking processes.
        warn: told of checks that had to be stopped.
    """

    def __init__(self, settings: RewardSettings, warn: Callable[[str], None] = warnings.warn):
        self._settings, self._warn = settings, warn
        self._pool: CheckerPool | None = None
        self._pool_owner = 0
        numbers = partial(read_number, settings=settings)
        self._readers: dict[AnswerKind, _Reader] = {
            "multiple_choice": read_choice,
            "multiple_select": read_choices,
            "yes_no": read_yes_no,
            "exact": read_text,
            "free_form": read_text,
            "ocr": read_text,
            "numerical": numbers,
            "regression": numbers,
            "mean_relative_accuracy": numbers,
            "mathematics": partial(read_mathematics, grade=self._grade),
            "time_span": partial(read_span, settings=settings),
            "box": partial(read_box, settings=settings),
        }

    def read(self, sample: Sample, output: str, truncated: bool) -> Reading:
        """What ``output`` answers to ``sample`` and what that is worth; a ``Reader`` of the contract.

        Args:
            sample: the question, with its gold answer.
            output: what a model wrote, without special tokens.
            truncated: whether the length limit cut it off.
        """
        return self._readers[sample.answer_kind](sample, said_in(output, truncated) or _NOTHING)

    def close(self) -> None:
        """End the checking processes. May be called twice."""
        if self._pool is not None and self._pool_owner == os.getpid():
            self._pool.close()
        self._pool = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _grade(self, answer: str, sample: Sample) -> Verdict:
        if self._pool is None or self._pool_owner != os.getpid():
            self._pool = CheckerPool(self._settings.checker, [PREPARE], self._warn)
            self._pool_owner = os.getpid()
        return grade_in(self._pool)(answer, sample)
