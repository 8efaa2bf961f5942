"""``vlm-pg score``: outputs of other programs, read, scored and reported as our own are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_pg.answers.whole import WholeReader
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.answer_files import RESULT, AnswerFiles
from vlm_pg.eval.external_outputs import read_outputs, score_outputs
from vlm_pg.eval.figure_lines import table
from vlm_pg.eval.judging.judge import check_judge, judge_answers, judge_record
from vlm_pg.eval.protocols.protocol import Protocol, load_protocol, protocol_names
from vlm_pg.eval.readers import OURS, ReaderKind, reader_name, reader_of
from vlm_pg.eval.record import PROTOCOL, SCHEMA, move_aside, own_functions, read_record
from vlm_pg.eval.report.page import write_eval_report
from vlm_pg.eval.settings import EvalJudgeSettings
from vlm_pg.files import write_json_atomic
from vlm_pg.observe.console import Console
from vlm_pg.observe.run_lock import RunLock
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample
from vlm_pg.versions import versions

# Names of what is written beside the result.
_PATTERNS, _JUDGED = ("answers_*.jsonl", "report.html"), "judged_*.jsonl"


@dataclass(frozen=True)
class Scoring:
    """What is to be scored, and how.

    ``records``: the prepared set. ``outputs``: see ``external_outputs.py``. ``protocol``: its name; None: the official
    one of the set of the records, else the first. ``reader``: ours or published; None: ours, unless the protocol names
    a reader of the user's own. ``doc_key``: the key of lmms-eval's "doc" with the question's id. ``out``: the folder of
    the result; None: one beside the outputs. ``judge``: a model that decides where the rules cannot.
    """

    records: Path
    outputs: Path
    protocol: str | None = None
    reader: ReaderKind | None = None
    doc_key: str | None = None
    out: Path | None = None
    judge: EvalJudgeSettings = field(default_factory=EvalJudgeSettings)


def score(scoring: Scoring) -> Path:
    """Score outputs, print the figures, and write ``result.json``, answers and ``report.html``; their folder.

    What an earlier scoring wrote into the folder is moved aside.

    Raises:
        ConfigError: records or outputs cannot be read, no protocol has the name, or it names no published rule.
        VlmPgError: no output belongs to a question.
    """
    console = Console(enabled=True)
    check_judge(scoring.judge)
    samples, bad = read_records(scoring.records)
    console.warn(*map(str, bad))
    protocol = _protocol(scoring.protocol, samples)
    if scoring.reader == "published" and (protocol is None or protocol.reader == OURS):
        name = "there is none for these records" if protocol is None else f"protocol {protocol.name} names none"
        raise ConfigError(f"--reader is published, and {name}. Give a protocol that names a rule, or --reader ours.")
    included = [sample for sample in samples if protocol is None or protocol.includes(sample)]
    name = "outputs" if protocol is None else protocol.name.partition("/")[0]
    reader = reader_name(OURS if scoring.reader is None and protocol is None else scoring.reader, protocol)
    console.info(f"{len(included):,} questions; protocol {protocol.name if protocol else 'none'}; read by {reader}")
    folder = scoring.out or scoring.outputs.with_name(f"scored-{scoring.outputs.stem}")
    _refuse_evaluation(folder)
    for path in (scoring.outputs, scoring.records):
        if path.parent.resolve() == folder.resolve() and any(map(path.match, (RESULT, *_PATTERNS, _JUDGED))):
            raise ConfigError(
                f"{path} has the name of a file that scoring writes into {folder}, and would be moved aside or "
                "overwritten. Give another folder with --out, or another name to the file."
            )
    # lmms-eval numbers questions by their index among all rows, also those that the protocol excludes.
    outputs = read_outputs(scoring.outputs, samples, scoring.doc_key, has_all=not bad)
    excluded = {sample.sample_id for sample in samples} - {sample.sample_id for sample in included}
    outputs = {name: texts for name, texts in outputs.items() if name not in excluded}
    with WholeReader(RewardSettings(), console.warn) as whole:
        read = reader_of(reader, protocol, whole)
        assert read is not None
        aggregation, categories = ("mean", ()) if protocol is None else (protocol.aggregation, protocol.categories)
        answered, figures = score_outputs(included, outputs, read, aggregation, categories)
    row = figures.to_row() | {"kind": "eval", "reader": reader, "n_not_asked": len(samples) - len(included)}
    result = {"sets": {name: row}, "protocol": _record(scoring, protocol, reader)}
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock.take(folder, console.info)
    try:
        _refuse_evaluation(folder)
        if (folder / RESULT).exists():
            # The outputs themselves may lie in the folder, and stay there.
            # A judge reuses its earlier decisions.
            patterns = (*_PATTERNS, *(() if scoring.judge.url is not None else (_JUDGED,)))
            written = [folder / RESULT, *(path for pattern in patterns for path in folder.glob(pattern))]
            move_aside(folder, written, console.info)
        AnswerFiles(folder, rank=0).complete(name, [one.to_row() for one in answered])
        judge_answers(scoring.judge, RewardSettings(), folder, result, console)
        write_json_atomic(folder / RESULT, result)
        report = write_eval_report(folder)
    finally:
        lock.release()
    console.info(*table(result))
    console.info(f"written to {report}")
    return folder


def _protocol(name: str | None, samples: Sequence[Sample]) -> Protocol | None:
    """The protocol of that name, else the official or first one of the records' pipeline; None: there is none."""
    if name is not None:
        return load_protocol(name)
    sources = {sample.source for sample in samples}
    fitting = [one for one in protocol_names() if load_protocol(one).pipeline in sources] if len(sources) == 1 else []
    sets = {one.partition("/")[0] for one in fitting}
    if len(sets) > 1:
        raise ConfigError(
            f"Records of {printable(next(iter(sources)), 100)} are asked in several ways: {', '.join(fitting)}. Give "
            "one of them with --protocol."
        )
    official = [one for one in fitting if one.endswith("/official")]
    return load_protocol((official or fitting)[0]) if fitting else None


def _refuse_evaluation(folder: Path) -> None:
    """Scores of external outputs must not replace answers of a model."""
    if (folder / PROTOCOL).exists() or any(folder.glob("answers_*.part-*")):
        raise ConfigError(f"{folder} holds an unfinished evaluation. Give another folder with --out.")
    if (folder / RESULT).exists() and "outputs" not in read_record(folder / RESULT)["decides"]:
        raise ConfigError(f"{folder} holds an evaluation. Give another folder with --out.")


def _record(scoring: Scoring, protocol: Protocol | None, reader: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "checkpoint": str(scoring.outputs),
        "decides": {
            "outputs": hashlib.sha256(scoring.outputs.read_bytes()).hexdigest(),
            "records": str(scoring.records),
            "reader": reader,
            "protocol": None if protocol is None else protocol.model_dump(mode="json"),
            **own_functions([] if protocol is None else [protocol]),
            "versions": versions(),
        },
        "machine": {},
        "judge": judge_record(scoring.judge),
        "config": {},
    }
