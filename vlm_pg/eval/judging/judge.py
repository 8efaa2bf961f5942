"""A judge for the outputs of finished sets: questions, decisions on disk, and figures beside those of the rules.

Figures by the rules stay unchanged: figures with the judge are added to the results, each decision to its output's row,
and all decisions of a set to ``judged_<set>.jsonl``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlm_pg.answers.whole import WholeReader
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.answer_files import AnswerFiles, answers_path, file_name
from vlm_pg.eval.contracts import Answered, Judged, Output, Reading
from vlm_pg.eval.judging.forms import JudgeQuestion, TooLong, decision, gold_of, prompts_digest, question_about
from vlm_pg.eval.settings import EvalJudgeSettings
from vlm_pg.files import json_line, parse_json_line, write_bytes_atomic
from vlm_pg.http.chat import CHAT_SETTINGS, ChatServer, NoReply, judge_key
from vlm_pg.observe.console import Console
from vlm_pg.rewards.settings import RewardSettings

_MAX_REASONS = 10


def judge_record(settings: EvalJudgeSettings) -> dict[str, Any] | None:
    """The judge in a result's record; None without one."""
    if settings.url is None:
        return None
    return {"url": settings.url, "model": settings.model, "prompts": prompts_digest()}


def check_judge(settings: EvalJudgeSettings) -> str | None:
    """The judge's key; fails before hours of answering.

    Raises:
        ConfigError: a judge is configured, and its key variable is not set, or openai is not installed.
    """
    if settings.url is None:
        return None
    return judge_key("eval.judge", settings.api_key_variable, "set eval.judge.url=null")


def judge_of_arguments(url: str | None, model: str | None, key_variable: str | None) -> EvalJudgeSettings:
    """The judge's settings from the arguments of ``vlm-pg score``; without a URL there is no judge.

    Raises:
        ConfigError: an invalid argument, or one without the URL.
    """
    if url is None and (model is not None or key_variable is not None):
        raise ConfigError("--judge-model and --judge-key-variable are about a judge. Name it with --judge URL.")
    given = {"url": url, "model": model, "api_key_variable": key_variable}
    try:
        return EvalJudgeSettings(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--judge: {first['loc'][0]} {first['msg'].removeprefix('Value error, ')}") from None


def judge_answers(
    settings: EvalJudgeSettings, reward: RewardSettings, folder: Path, results: dict[str, Any], console: Console
) -> None:
    """Add the figures with the judge to every set of ``results``, under ``judged``; nothing without a judge.

    Args:
        folder: of the sets' answers.

    Raises:
        ConfigError: as ``check_judge``.
    """
    if settings.url is None:
        return
    with _Judge(settings, reward, console) as judge:
        for name, figures in results["sets"].items():
            figures["judged"] = judge.judge_set(folder, name, figures["aggregation"])


@dataclass(frozen=True)
class _DecisionKey:
    """Judge, question and gold answer of a decision, which holds for equal ones only.

    ``message``: digest of the message. ``gold``: kind and text of the gold answer, which most messages do not show.
    """

    url: str
    model: str | None
    message: str
    gold: str


# Sample id, and index of an output among the question's outputs.
_OutputId = tuple[str, int]


@dataclass(frozen=True)
class _OpenOutput:
    """An undecided output. ``query``: the judge's question; None where the output is too long (``why``)."""

    output_id: _OutputId
    question: Answered
    output: Output
    query: JudgeQuestion | None
    why: str = ""

    def undecided(self, why: str) -> Judged:
        return Judged("" if self.query is None else self.query.form, False, None, self.output.reading.score, why)


class _DecisionFile:
    """The decisions about one set's outputs, appended as replies come, so that a killed evaluation repeats none.

    judged_NAME.part.jsonl while the set NAME is judged, then judged_NAME.jsonl in the order of its records.
    """

    def __init__(self, folder: Path, name: str):
        self._path = folder / f"judged_{file_name(name)}.jsonl"
        self._part = self._path.with_suffix(".part.jsonl")

    def read(self) -> dict[tuple[_OutputId, _DecisionKey], Judged]:
        """Decisions of an earlier attempt; a truncated line is skipped."""
        found: dict[tuple[_OutputId, _DecisionKey], Judged] = {}
        for path in (self._path, self._part):
            for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
                row: Any = parse_json_line(line)
                try:
                    output_id = row["sample_id"], row["output"]
                    judged, key = Judged(**row["judged"]), _DecisionKey(**row["asked"])
                except (KeyError, TypeError):
                    continue
                if judged.decided:
                    found[output_id, key] = judged
        return found

    def append(self, one: _OpenOutput, key: _DecisionKey, judged: Judged) -> None:
        """Write one decision."""
        with self._part.open("ab") as file:
            # A truncated line before becomes a line of its own.
            file.write(b"\n" * bool(file.tell()) + _line(one, key, judged))

    def complete(self, rows: Sequence[tuple[_OpenOutput, _DecisionKey, Judged]]) -> None:
        """Write all rows of the set atomically."""
        write_bytes_atomic(self._path, b"".join(_line(*row) for row in rows))
        self._part.unlink(missing_ok=True)


def _line(one: _OpenOutput, key: _DecisionKey, judged: Judged) -> bytes:
    output, (sample_id, index) = one.output, one.output_id
    row: dict[str, Any] = {"sample_id": sample_id, "output": index}
    row["rules"] = {"answer": output.reading.answer, "score": output.reading.score}
    return json_line({**row, "judged": asdict(judged), "asked": asdict(key), "text": output.text})


class _Judge(AbstractContextManager["_Judge"]):
    """Judges one set after the other; a context manager.

    Args:
        settings: with a URL.
        reward: settings of the rules that score the judge's answers.
    """

    def __init__(self, settings: EvalJudgeSettings, reward: RewardSettings, console: Console):
        key = check_judge(settings)
        self._settings, self._console, self._url = settings, console, str(settings.url).rstrip("/")
        self._server = ChatServer("eval.judge", key, **settings.model_dump(include=CHAT_SETTINGS))
        self._whole = WholeReader(reward, console.warn)

    def __exit__(self, *error: object) -> None:
        self._whole.close()

    def judge_set(self, folder: Path, name: str, aggregation: str) -> dict[str, Any]:
        """Judge the outputs of a set whose answers are in ``folder``, and add the decisions to their rows.

        Returns:
            The figures with the judge (``_judged_row``).
        """
        rows = [json.loads(line) for line in answers_path(folder, name).read_bytes().splitlines()]
        found = [one for row in rows for one in self._open(Answered.from_row(row))]
        file = _DecisionFile(folder, name)
        unreachable = self._server.find_model() if any(one.query for one in found) else None
        decisions, unreached = self._decisions(name, found, file, unreachable)
        for row in rows:
            for index, output in enumerate(row["outputs"]):
                output.pop("judged", None)
                if (judged := decisions.get((row["sample_id"], index))) is not None:
                    output["judged"] = asdict(judged)
        AnswerFiles(folder, rank=0).complete(name, rows)
        # Without a reply the judge's model is unknown, so earlier decisions might be another judge's.
        if unreachable is None or not file.read():
            file.complete([(one, self._key(one), decisions[one.output_id]) for one in found])
        answered = [Answered.from_row(row) for row in rows]
        figures = _judged_row(aggregation, answered, self._server.model, unreached)
        if figures["n_unreached"]:
            why = next(iter(figures["undecided"]))  # the most common
            self._console.warn(
                f"{name}: the judge at {self._url} gave no reply about {figures['n_unreached']:,} of "
                f"{figures['n_asked']:,} outputs ({printable(why)}). The figures of the rules stand; there is none "
                "with the judge."
            )
        return figures

    def _open(self, question: Answered) -> Iterator[_OpenOutput]:
        for index, output in enumerate(question.outputs):
            output_id = question.sample_id, index
            try:
                query = question_about(question, output, self._settings.max_output_characters)
            except TooLong as error:
                yield _OpenOutput(output_id, question, output, None, str(error))
            else:
                if query is not None:
                    yield _OpenOutput(output_id, question, output, query)

    def _decisions(
        self, name: str, found: list[_OpenOutput], file: _DecisionFile, unreachable: NoReply | None
    ) -> tuple[dict[_OutputId, Judged], int]:
        """The decision about each output, earlier ones included, and for how many the server failed."""
        earlier = file.read()
        decisions = {
            one.output_id: earlier[key] for one in found if (key := (one.output_id, self._key(one))) in earlier
        }
        if decisions:
            self._console.info(f"{name}: the judge decided about {len(decisions):,} output(s) before")
        decisions |= {one.output_id: one.undecided(one.why) for one in found if one.query is None}
        waiting = [(one, one.query) for one in found if one.query is not None and one.output_id not in decisions]
        unreached = 0
        with self._console.progress(f"asking the judge about {name}", len(waiting)) as bar:

            def take(index: int, reply: str | NoReply) -> None:
                nonlocal unreached
                one, query = waiting[index]
                if isinstance(reply, NoReply):
                    unreached += not reply.of_message
                    decisions[one.output_id] = one.undecided(reply.why)
                else:
                    judged = decisions[one.output_id] = decision(one.question, one.output, query, reply, self._whole)
                    file.append(one, self._key(one), judged)
                bar.advance()

            if unreachable is None:
                self._server.replies([query.message for _, query in waiting], on_reply=take)
            else:
                for index in range(len(waiting)):
                    take(index, unreachable)
        return decisions, unreached

    def _key(self, one: _OpenOutput) -> _DecisionKey:
        message = "" if one.query is None else one.query.digest
        return _DecisionKey(self._url, self._server.model, message, gold_of(one.question))


def _judged_row(aggregation: str, answered: Sequence[Answered], model: str | None, unreached: int) -> dict[str, Any]:
    """The part "judged" of a set's figures.

    ``accuracy``, ``standard_error`` and ``n`` by the set's own aggregation; no value where the server failed for some
    output (``n_unreached``), since another attempt would give another figure. Of outputs: ``n_asked`` = ``n_decided`` +
    ``n_undecided``; of those decided, ``n_raised`` score more than by the rules, ``n_lowered`` less, ``n_valued`` have
    a value that rules do not give, ``n_unchanged`` score the same; ``n_none`` have no answer for the judge either.
    ``undecided``: reasons by frequency.

    Args:
        unreached: undecided outputs for which the server failed.
    """
    judged = [(one, one.judged) for question in answered for one in question.outputs if one.judged is not None]
    changes = Counter(_change(one.reading.score, by_judge.score) for one, by_judge in judged if by_judge.decided)
    reasons = Counter(by_judge.note for _, by_judge in judged if not by_judge.decided)
    figures = aggregate(aggregation, [_with_judge(question) for question in answered]).to_row()
    if unreached:
        figures |= {"accuracy": None, "standard_error": None}
    return {
        **{key: figures[key] for key in ("accuracy", "standard_error", "n")},
        "model": model,
        "n_asked": len(judged),
        "n_decided": changes.total(),
        "n_undecided": reasons.total(),
        "n_unreached": unreached,
        **{f"n_{change}": changes[change] for change in ("raised", "lowered", "valued", "unchanged")},
        "n_none": sum(by_judge.decided and by_judge.answer is None for _, by_judge in judged),
        "undecided": dict(reasons.most_common(_MAX_REASONS)),
    }


def _with_judge(question: Answered) -> Answered:
    """The question with the judge's decisions as the readings of its outputs."""
    outputs = [
        replace(one, reading=Reading(one.judged.answer, one.judged.score, f"judge ({one.judged.form})"))
        if one.judged is not None and one.judged.decided
        else one
        for one in question.outputs
    ]
    return replace(question, outputs=tuple(outputs))


def _change(before: float | None, now: float | None) -> str:
    if before == now:
        return "unchanged"
    if before is None or now is None:
        return "valued"
    return "raised" if now > before else "lowered"
