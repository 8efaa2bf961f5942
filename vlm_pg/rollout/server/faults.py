"""Questions for which a server gave nothing that can be learned from: one is data, many in a row are the server."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.rollout.server.answers import Answer
from vlm_pg.rollout.server.client import RUN_GOES_ON
from vlm_pg.rollout.server.errors import AnswerError, ServerError
from vlm_pg.types import BadSample, Prompt

# The reason that bad_samples.jsonl has for a question whose answers do not fit.
UNUSABLE = "server_answer"
# A resumed run asks with the same seeds again, so a single question must not end it. So many in a row are no accident.
MOST_IN_A_ROW = 8


class Faults:
    """Collects the questions that were left out, over all calls of one engine (every rank has its own).

    Args:
        url: of the server.
        tries: how often each question was asked.
        goes_on: a sentence: how to go on once the server is right.
    """

    def __init__(self, url: str, tries: int, goes_on: str = RUN_GOES_ON):
        self._url, self._tries, self._goes_on = url, tries, goes_on
        self._found: list[BadSample] = []
        self._in_a_row = 0

    def add(self, prompts: Sequence[Prompt], found: Sequence[list[Answer] | AnswerError]) -> None:
        """What came back for each prompt, in the order of the questions.

        Raises:
            ServerError: ``MOST_IN_A_ROW`` questions had no usable answer, with none between that had one.
        """
        for prompt, answer in zip(prompts, found, strict=True):
            if not isinstance(answer, AnswerError):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            self._found.append(BadSample(prompt.sample_id, UNUSABLE, str(answer), self._url))
            if self._in_a_row >= MOST_IN_A_ROW:
                # What is caught and tried again begins anew.
                count, self._in_a_row = self._in_a_row, 0
                raise ServerError(
                    f"The server at {self._url} gave no usable answer to {count} questions in a row, each of which was "
                    f"asked up to {self._tries} times. The last error: {answer} Put the server right. "
                    f"{self._goes_on}"
                )

    def take(self) -> list[BadSample]:
        """The faults since the last call."""
        found, self._found = self._found, []
        return found
