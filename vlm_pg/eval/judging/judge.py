"""A judge for the outputs of finished sets: questions, decisions on disk, and figures beside those of the rules.

Figures by the rules stay unchanged: figures with the judge are added to the results, each decision to its output's row,
and all decisions of a set to ``judged_<set>.jsonl``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlm_pg.answers.whole import WholeReader
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.answer_files import AnswerFiles, Row, answers_path, file_name
from vlm_pg.eval.contracts import Answered, Judged, Output, Reading
from vlm_pg.eval.judging.forms import JudgeQuestion, TooLong, decision, gold_of, prompts_digest, question_about
from vlm_pg.eval.judging.settings import EvalJudgeSettings
from vlm_pg.files import json_line, parse_json_line, write_bytes_atomic
from vlm_pg.http.chat import ChatServer, NoReply, judge_key
from vlm_pg.observe.console import Console
from vlm_pg.rewards.settings import RewardSettings

_MOST_REASONS = 10


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


@dataclass(frozen=True)
class OutputId:
    """One output: its question, and its index among the question's outputs."""

    sample_id: str
    output: int


@dataclass(frozen=True)
class DecisionKey:
    """Judge, question and gold answer of a decision, which holds for equal ones only.

    ``message``: digest of the message. ``gold``: kind and text of the gold answer, which most messages do not show.
    """

    url: str
    model: str | None
    message: str
    gold: str


class DecisionFile:
    """The decisions about one set's outputs, appended as replies come, so that a killed evaluation repeats none.

    judged_NAME.part.jsonl while the set NAME is judged, then judged_NAME.jsonl in the order of its records.

    Args:
        folder: of the evaluation.
        name: of the set.
    """

    def __init__(self, folder: Path, name: str):
        self.path = folder / f"judged_{file_name(name)}.jsonl"
        self._part = self.path.with_suffix(".part.jsonl")

    def kept(self) -> dict[tuple[OutputId, DecisionKey], Judged]:
        """Decisions of an earlier attempt; a truncated line is skipped."""
        found: dict[tuple[OutputId, DecisionKey], Judged] = {}
        for path in (self.path, self._part):
            for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
                row = parse_json_line(line)
                try:
                    output_id = OutputId(row["sample_id"], row["output"])  # type: ignore[index]
                    judged = Judged(**row["judged"])  # type: ignore[index]
                    asked = DecisionKey(**row["asked"])  # type: ignore[index]
                except (KeyError, TypeError):
                    continue
                if judged.decided:
                    found[output_id, asked] = judged
        return found

    def append(self, output_id: OutputId, output: Output, asked: DecisionKey, judged: Judged) -> None:
        """Write one decision."""
        with self._part.open("ab") as file:
            # A truncated line before becomes a line of its own.
            file.write(b"\n" * bool(file.tell()) + _line(output_id, output, asked, judged))

    def complete(self, rows: Sequence[tuple[OutputId, Output, DecisionKey, Judged]]) -> None:
        """Write all rows of the set atomically."""
        write_bytes_atomic(self.path, b"".join(_line(*row) for row in rows))
        self._part.unlink(missing_ok=True)


def _line(output_id: OutputId, output: Output, asked: DecisionKey, judged: Judged) -> bytes:
    rules: Mapping[str, Any] = {"answer": output.reading.answer, "score": output.reading.score}
    row = {**asdict(output_id), "rules": rules, "judged": asdict(judged), "asked": asdict(asked), "text": output.text}
    return json_line(row)


@dataclass(frozen=True)
class _OpenOutput:
    """An undecided output. ``asked``: the question; None where the output is too long (``why``)."""

    output_id: OutputId
    question: Answered
    output: Output
    asked: JudgeQuestion | None
    why: str = ""


class Judge(AbstractContextManager["Judge"]):
    """Judges one set after the other; a context manager.

    Args:
        settings: with a URL.
        reward: settings of the rules that score answers the judge has found.

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
        """Judge the outputs of a set whose answers are in ``folder``, and add the decisions to their rows.

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
        # Without a reply the judge's model is unknown, so earlier decisions might be another judge's.
        if unreachable is None or not file.kept():
            file.complete([(one.output_id, one.output, self._key(one), made[one.output_id]) for one in found])
        judged = [Answered.from_row(row) for row in rows]
        figures = judged_row(aggregation, judged, self._server.model, unreached)
        if figures["n_unreached"]:
            why = next(iter(figures["undecided"]))  # the most common
            self._console.warn(
                f"{name}: the judge at {self._url} gave no reply about {figures['n_unreached']:,} of "
                f"{figures['n_asked']:,} outputs ({printable(why)}). The figures of the rules stand; there is none "
                "with the judge."
            )
        return figures

    def _open(self, answered: list[Answered]) -> Iterator[_OpenOutput]:
        for question in answered:
            for number, output in enumerate(question.outputs):
                output_id = OutputId(question.sample_id, number)
                try:
                    asked = question_about(question, output, self._settings.max_output_characters)
                except TooLong as error:
                    yield _OpenOutput(output_id, question, output, None, str(error))
                else:
                    if asked is not None:
                        yield _OpenOutput(output_id, question, output, asked)

    def _decided(
        self, name: str, found: list[_OpenOutput], file: DecisionFile, unreachable: NoReply | None
    ) -> tuple[dict[OutputId, Judged], int]:
        """The decision about each output, earlier ones included, and for how many the server failed."""
        kept = file.kept()
        made = {one.output_id: kept[key] for one in found if (key := (one.output_id, self._key(one))) in kept}
        if made:
            self._console.info(f"{name}: the judge decided about {len(made):,} output(s) before")
        for one in found:
            if one.asked is None:
                made[one.output_id] = _undecided(one, one.why)
        waiting = [one for one in found if one.output_id not in made]
        messages = [one.asked.message for one in waiting if one.asked is not None]
        unreached = 0
        with self._console.progress(f"asking the judge about {name}", len(messages)) as bar:

            def take(index: int, reply: str | NoReply) -> None:
                nonlocal unreached
                one = waiting[index]
                if isinstance(reply, NoReply):
                    unreached += not reply.of_message
                    made[one.output_id] = _undecided(one, reply.why)
                else:
                    assert one.asked is not None
                    judged = made[one.output_id] = decision(one.question, one.output, one.asked, reply, self._whole)
                    file.append(one.output_id, one.output, self._key(one), judged)
                bar.advance()

            if unreachable is None:
                self._server.replies(messages, on_reply=take)
            else:
                for index in range(len(messages)):
                    take(index, unreachable)
        return made, unreached

    def _key(self, one: _OpenOutput) -> DecisionKey:
        message = "" if one.asked is None else one.asked.digest
        return DecisionKey(self._url, self._server.model, message, gold_of(one.question))


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


def _undecided(one: _OpenOutput, why: str) -> Judged:
    form = "" if one.asked is None else one.asked.form
    return Judged(form, False, None, one.output.reading.score, why)


def _write(folder: Path, name: str, rows: list[Row], made: dict[OutputId, Judged]) -> None:
    """Write the rows with the decisions."""
    for row in rows:
        for number, output in enumerate(row["outputs"]):
            output.pop("judged", None)
            judged = made.get(OutputId(row["sample_id"], number))
            if judged is not None:
                output["judged"] = asdict(judged)
    AnswerFiles(folder, rank=0).complete(name, rows)


def with_judge(question: Answered) -> Answered:
    """The question with the judge's decisions as the readings of its outputs."""
    outputs = [
        replace(one, reading=Reading(one.judged.answer, one.judged.score, f"judge ({one.judged.form})"))
        if one.judged is not None and one.judged.decided
        else one
        for one in question.outputs
    ]
    return replace(question, outputs=tuple(outputs))


def judged_row(aggregation: str, answered: Sequence[Answered], model: str | None, unreached: int) -> dict[str, Any]:
    """The part "judged" of a set's figures.

    ``accuracy``, ``standard_error`` and ``n`` by the set's own aggregation; no value where the server failed for some
    output (``n_unreached``), since another attempt would give another figure. Of outputs: ``n_asked`` = ``n_decided`` +
    ``n_undecided``; of those decided, ``n_raised`` score more than by the rules, ``n_lowered`` less, ``n_valued`` have
    a value that rules do not give, ``n_unchanged`` score the same; ``n_none`` have no answer for the judge either.
    ``undecided``: reasons by frequency.

    Args:
        unreached: undecided outputs for which the server failed.
    """
    asked = [(one, one.judged) for question in answered for one in question.outputs if one.judged is not None]
    decided = [(one, judged) for one, judged in asked if judged.decided]
    changes = Counter(_change(one, judged) for one, judged in decided)
    reasons = Counter(judged.note for _, judged in asked if not judged.decided)
    figures = aggregate(aggregation, [with_judge(question) for question in answered]).to_row()
    if unreached:
        figures |= {"accuracy": None, "standard_error": None}
    return {
        **{key: figures[key] for key in ("accuracy", "standard_error", "n")},
        "model": model,
        "n_asked": len(asked),
        "n_decided": len(decided),
        "n_undecided": len(asked) - len(decided),
        "n_unreached": unreached,
        **{f"n_{change}": changes[change] for change in ("raised", "lowered", "valued", "unchanged")},
        "n_none": sum(judged.answer is None for _, judged in decided),
        "undecided": dict(reasons.most_common(_MOST_REASONS)),
    }


def _change(output: Output, judged: Judged) -> str:
    before, now = output.reading.score, judged.score
    if before is None or now is None:
        return "unchanged" if before == now else "valued"
    return "raised" if now > before else "lowered" if now < before else "unchanged"
