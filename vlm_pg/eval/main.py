"""``vlm-pg eval``: a checkpoint against the evaluation sets of its configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig, RunSettings
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import Meeting, RankLayout
from vlm_pg.errors import ConfigError, TooManyBadSamples
from vlm_pg.eval.answer_files import RESULT, AnswerFiles, answers_path, file_name, read_answers
from vlm_pg.eval.eval_model import joined_ranks, open_policy, opened_model
from vlm_pg.eval.eval_set import EvalSet
from vlm_pg.eval.external_outputs import record_indices, write_lmms_samples
from vlm_pg.eval.figure_lines import table
from vlm_pg.eval.judging.judge import check_judge, judge_answers
from vlm_pg.eval.record import PROTOCOL, compare_results, prepare_folder, protocol_record, run_above
from vlm_pg.eval.report.page import write_eval_report
from vlm_pg.eval.runner import Evaluator
from vlm_pg.eval.server_evaluation import ServerEvaluation
from vlm_pg.eval.settings import NO_SETS
from vlm_pg.files import write_json_atomic
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.observe.logs import save_strip
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.run_lock import RunLock
from vlm_pg.types import Prompt, Sample


def evaluate(config: RunConfig, checkpoint: Path | None, like: Path | None = None) -> bool:
    """Evaluate ``checkpoint`` (default: ``model.path``), print the figures, and write them beside the answers.

    Everything is written to ``eval-<checkpoint name>/`` in the checkpoint's run folder (``runs/`` for other models),
    whose name also has that of the configuration where it is a suite of protocols and not the run's own, the number of
    rollouts and temperature unless greedy, and "server" where ``rollout.engine`` is a server: ``result.json`` with the
    figures and all that they depended on, one JSON line of answers per question and set, and the samples that could not
    be used. Processes started by a launcher share the questions.

    Args:
        like: the result that is repeated, to compare with.

    Returns:
        False if the answers of ``like`` were not reproduced.

    Raises:
        ConfigError: the configuration names no evaluation sets, or an unfinished evaluation in the folder had another
            protocol.
        ServerError: the server does not answer, is of no known kind, or does not support the request.
        TooManyBadSamples: no question of a set could be scored; everything is written before.
    """
    if not config.data.eval:
        raise ConfigError(NO_SETS)
    check_judge(config.eval.judge)
    path = Path(config.model.path) if checkpoint is None else checkpoint
    with joined_ranks(config) as ranks:
        return _evaluate(config, path, like, ranks)


def _evaluate(config: RunConfig, path: Path, like: Path | None, ranks: RankLayout) -> bool:
    console = Console(enabled=ranks.is_rank0)
    start_seconds = time.monotonic()
    folder = result_folder(config, path)
    if like is not None:
        folder = folder.with_name(f"{folder.name}-again")
        if like.resolve().parent == folder.resolve():
            folder = folder.with_name(f"{folder.name}-again")
    with ExitStack() as stack:
        policy, server = open_policy(config, path, console)
        record = protocol_record(config, path, policy, None if server is None else server.record())

        def prepared() -> list[dict[str, Any]]:
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(RunLock.take(folder, console.info).release)
            return prepare_folder(folder, record, config.eval.resume, console.info)

        machines_before = ranks.from_rank0(prepared)
        folder.mkdir(parents=True, exist_ok=True)  # on other hosts
        results, sets = _answer(config, policy, server, ranks, console, folder)
        if ranks.is_rank0:
            judge_answers(config.eval.judge, config.reward, folder, results, console)
        Meeting().wait()  # collectives would not wait for a judge
        seconds = round(time.monotonic() - start_seconds, 1)
        results["protocol"] = record | {"machines_before": machines_before, "seconds": seconds}
        lmms_sets = sets if config.eval.lmms_samples else []
        reproduced = ranks.from_rank0(lambda: _conclude(results, folder, console, like, lmms_sets))
    # A script that checks the exit code must not take a set without a figure for a measured one.
    if unscored := [name for name, figures in results["sets"].items() if figures["accuracy"] is None]:
        raise TooManyBadSamples(
            f"No question of {', '.join(unscored)} could be scored. The cause of each is in "
            f"{folder / 'bad_samples.jsonl'}, where the questions were usable in the answers beside it. Repair the "
            "data, or leave the set out with eval.sets."
        )
    return reproduced


def _answer(
    config: RunConfig,
    policy: Policy | WeightlessPolicy,
    server: ServerEvaluation | None,
    ranks: RankLayout,
    console: Console,
    folder: Path,
) -> tuple[dict[str, Any], list[EvalSet]]:
    """The figures, and the sets."""
    data, run_folder = config.data, RunFolder(folder)
    log = None
    if ranks.is_rank0:
        path = folder / "bad_samples.jsonl"
        log = BadSampleLog(path, data.max_bad_share, data.min_seen_for_bad_share, console.warn)

    def describe(sample: Sample, prompt: Prompt, index: int) -> Mapping[str, Any]:
        """What was shown, for the report; of a set's first questions with the frames as a picture."""
        strip = None
        if index < config.eval.thumbnails:
            strip = save_strip(run_folder, sample.sample_id, prompt, config.observe.thumbnails or 8)
        shown = {
            "frames": [] if strip is None else [strip],
            "seconds": list(prompt.preview_seconds),
            "prompt_tokens": prompt.num_tokens,
            "visual_tokens": prompt.num_visual_tokens,
            "content": prompt.content_key,
        }
        return {"shown": shown}

    with opened_model(config, policy, server, ranks, console) as eval_model:
        evaluator = Evaluator(config, eval_model, console, log, describe)
        return evaluator.run("answers", AnswerFiles(folder, ranks.rank)), evaluator.sets


def _conclude(
    results: dict[str, Any], folder: Path, console: Console, like: Path | None, lmms_sets: list[EvalSet]
) -> bool:
    """Write and print the result; whether it equals the one that it repeats.

    ``lmms_sets``: sets whose answers are also written in lmms-eval's format.
    """
    write_json_atomic(folder / RESULT, results)
    (folder / PROTOCOL).unlink(missing_ok=True)
    console.info(*table(results))
    for item in lmms_sets:
        answered = read_answers(answers_path(folder, item.name))
        path = folder / f"lmms_samples_{file_name(item.name)}.jsonl"
        write_lmms_samples(path, answered, record_indices(item.records))
    write_eval_report(folder)
    console.info(f"written to {folder}; look at {folder / 'report.html'}")
    if like is None:
        return True
    reproduced, lines = compare_results(like, folder / RESULT)
    console.info(*lines)
    return reproduced


def result_folder(config: RunConfig, path: Path) -> Path:
    """The folder of the results; those of other weights, suites or sampling settings do not overwrite each other."""
    run, settings = Path(config.run.dir), config.eval
    is_own = run.resolve() in path.resolve().parents
    # With a suite's configuration the run folder is not the checkpoint's, and all runs have checkpoints of one name.
    home = run if is_own else run_above(path) or run.parent
    has_name = config.run.name != RunSettings.model_fields["name"].default
    suite = f"-{config.run.name}" if has_name and settings.protocols and not is_own else ""
    samples = any(name not in settings.protocols for name in settings.chosen_sets(list(config.data.eval)))
    suffix = ""
    if samples and settings.temperature != 0:
        suffix = f"-n{settings.num_generations}-t{settings.temperature:g}"
    server = "-server" if config.rollout.engine == "server" else ""
    return home / f"eval-{path.name}{suite}{suffix}{server}"
