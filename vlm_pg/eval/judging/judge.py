"""Asking a judge about the outputs of finished sets, in the folder where their answers lie.

What the rules say stays as it is: the figures with the judge are added to the results, each decision to its output's
row, and all of a set to ``judged_<set>.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_pg.answers.whole import WholeReader
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.answer_files import AnswerFiles, Row, answers_path
from vlm_pg.eval.contracts import Answered, Judged, Output
from vlm_pg.eval.judging.asked import TooLong, decision, enquiry_about, gold_of
from vlm_pg.eval.judging.decisions import AskedOf, DecisionFile, Place
from vlm_pg.eval.judging.figures import judged_row
from vlm_pg.eval.judging.forms import Enquiry, prompts_digest
from vlm_pg.eval.judging.settings import EvalJudgeSettings
from vlm_pg.http.chat import ChatServer, NoReply
from vlm_pg.http.keys import read_key
from vlm_pg.observe.console import Console
from vlm_pg.rewards.settings import RewardSettings


def judge_record(settings: EvalJudgeSettings) -> dict[str, Any] | None:
    """What a result says of its judge; None without one."""
    if settings.url is None:
        return None
    return {"url": settings.url, "model": settings.model, "prompts": prompts_digest()}


def check_judge(settings: EvalJudgeSettings) -> str | None:
    """The judge's key; before hours of answering, whether a judge could be asked at all.

    Raises:
        ConfigError: there is a judge, and its key variable is not set, or httpx2 is not installed.
    """
    if settings.url is None:
        return None
    if find_spec("httpx2") is None:
        raise ConfigError(
            "eval.judge needs httpx2, which is not installed. Install vlm-pg[server], or set eval.judge.url=null."
        )
    return read_key("eval.judge", settings.api_key_variable)


@dataclass(frozen=True)
class _Open:
    """An output that there is something to ask about. ``asked``: how; None where it is too long (``why``)."""

    place: Place
    question: Answered
    output: Output
    asked: Enquiry | None
    why: str = ""


class Judge(AbstractContextManager["Judge"]):
    """Asks about one set after the other; a context manager, to be closed when no more come.

    Args:
        settings: with a URL.
        reward: how rules score answers that the judge has found.

    Raises:
        ConfigError: as ``check_judge``.
    """

    def __init__(self, settings: EvalJudgeSettings, reward: RewardSettings, console: Console):
        key = check_judge(settings)
        self._settings, self._console, self._url = settings, console, str(settings.url).rstrip("/")
        self._server = ChatServer(
            self._url,
            settings.model,
            key,
            "eval.judge",
            settings.timeout_seconds,
            settings.retries,
            settings.concurrency,
        )
        self._whole = WholeReader(reward, console.warn)

    def __exit__(self, *error: object) -> None:
        self._whole.close()

    def judge_set(self, folder: Path, name: str, aggregation: str) -> dict[str, Any]:
        """Judge the outputs of a set whose answers are in ``folder``, and add the decisions to them.

        Returns:
            The figures with the judge (``judged_row``).
        """
        rows = [json.loads(line) for line in answers_path(folder, name).read_bytes().splitlines()]
        answered = [Answered.from_row(row) for row in rows]
        found = list(self._open(answered))
        file = DecisionFile(folder, name)
        unreachable = self._server.find_model() if any(one.asked for one in found) else None
        made, unreached = self._decided(name, found, file, unreachable)
        _write(folder, name, rows, made)
        # A judge that is away does not say its name, so that what it decided before could not be told to be its own.
        if unreachable is None or not file.kept():
            file.complete([(one.place, one.output, self._asked_of(one), made[one.place]) for one in found])
        judged = [Answered.from_row(row) for row in rows]
        figures = judged_row(aggregation, judged, self._server.model, unreached)
        self._say(name, figures)
        return figures

    def _open(self, answered: list[Answered]) -> Iterator[_Open]:
        for question in answered:
            for number, output in enumerate(question.outputs):
                place = Place(question.sample_id, number)
                try:
                    asked = enquiry_about(question, output, self._settings.max_output_characters)
                except TooLong as error:
                    yield _Open(place, question, output, None, str(error))
                else:
                    if asked is not None:
                        yield _Open(place, question, output, asked)

    def _decided(
        self, name: str, found: list[_Open], file: DecisionFile, unreachable: NoReply | None
    ) -> tuple[dict[Place, Judged], int]:
        """What has come of each, those kept from before among them, and of how many the server at fault gave none."""
        kept = file.kept()
        made = {one.place: kept[key] for one in found if (key := (one.place, self._asked_of(one))) in kept}
        if made:
            self._console.info(f"{name}: the judge decided about {len(made):,} output(s) before")
        for one in found:
            if one.asked is None:
                made[one.place] = _undecided(one, one.why)
        waiting = [one for one in found if one.place not in made]
        messages = [one.asked.message for one in waiting if one.asked is not None]
        unreached = 0
        with self._console.progress(f"asking the judge about {name}", len(messages)) as bar:

            def take(place: int, reply: str | NoReply) -> None:
                nonlocal unreached
                one = waiting[place]
                if isinstance(reply, NoReply):
                    unreached += not reply.of_message
                    made[one.place] = _undecided(one, reply.why)
                else:
                    assert one.asked is not None
                    judged = made[one.place] = decision(one.question, one.output, one.asked, reply, self._whole)
                    file.append(one.place, one.output, self._asked_of(one), judged)
                bar.advance()

            if unreachable is None:
                self._server.replies(messages, on_reply=take)
            else:
                for place in range(len(messages)):
                    take(place, unreachable)
        return made, unreached

    def _asked_of(self, one: _Open) -> AskedOf:
        message = "" if one.asked is None else one.asked.digest
        return AskedOf(self._url, self._server.model, message, gold_of(one.question))

    def _say(self, name: str, figures: dict[str, Any]) -> None:
        if figures["n_unreached"]:
            why = next(iter(figures["undecided"]))  # the most common
            self._console.warn(
                f"{name}: the judge at {self._url} gave no reply about {figures['n_unreached']:,} of "
                f"{figures['n_asked']:,} outputs ({printable(why)}). The figures of the rules stand; there is none "
                "with the judge."
            )


def judge_answers(
    settings: EvalJudgeSettings, reward: RewardSettings, folder: Path, results: dict[str, Any], console: Console
) -> None:
    """Add the figures with the judge to every set of ``results``, under ``judged``; nothing without a judge.

    Args:
        folder: where the answers of the sets lie.

    Raises:
        ConfigError: as ``Judge``.
    """
    if settings.url is None:
        return
    with Judge(settings, reward, console) as judge:
        for name, figures in results["sets"].items():
            figures["judged"] = judge.judge_set(folder, name, figures["aggregation"])


def _undecided(one: _Open, why: str) -> Judged:
    form = "" if one.asked is None else one.asked.form
    return Judged(form, False, None, one.output.reading.score, why)


def _write(folder: Path, name: str, rows: list[Row], made: dict[Place, Judged]) -> None:
    """Put the decisions into the rows, and write them."""
    for row in rows:
        for number, output in enumerate(row["outputs"]):
            output.pop("judged", None)
            judged = made.get(Place(row["sample_id"], number))
            if judged is not None:
                output["judged"] = asdict(judged)
    AnswerFiles(folder, rank=0).complete(name, rows)
