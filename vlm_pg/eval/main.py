"""``vlm-pg eval``: a checkpoint against the evaluation sets of its configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_pg.answers.whole import WholeReader
from vlm_pg.config import RunConfig, RunSettings
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.distributed import Meeting, RankLayout, disconnect, join_ranks, local_device
from vlm_pg.errors import ConfigError, TooManyBadSamples
from vlm_pg.eval.answer_files import AnswerFiles, answers_path, file_name, read_answers
from vlm_pg.eval.figure_lines import table
from vlm_pg.eval.folder import PROTOCOL, RESULT, open_folder, run_above
from vlm_pg.eval.judging.judge import check_judge, judge_answers
from vlm_pg.eval.lmms_samples import record_places, write_lmms_samples
from vlm_pg.eval.record import protocol_record
from vlm_pg.eval.repeat import compared
from vlm_pg.eval.report import write_eval_report
from vlm_pg.eval.runner import EvalModel, Evaluator
from vlm_pg.eval.server_evaluation import ServerEvaluation
from vlm_pg.files import write_json_atomic
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import WeightlessPolicy, load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.observe.logs import save_strip
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.threads import use_threads
from vlm_pg.types import Prompt, Sample
from vlm_pg.watch.watch import RankWatch

_NO_NAME = RunSettings.model_fields["name"].default


def evaluate(config: RunConfig, checkpoint: Path | None, like: Path | None = None) -> bool:
    """Evaluate ``checkpoint`` (default: ``model.path``), print the figures, and write them beside the answers.

    Everything lands in ``eval-<checkpoint name>/`` in the checkpoint's run folder (``runs/`` for other models), with
    the name of the configuration where that is a suite of protocols and not the run's own, the number of rollouts and
    temperature unless greedy, and "server" where ``rollout.engine`` has one
    answer, whose weights are its own: ``result.json`` with the figures and all that
    they depended on, one JSON line of answers per question and set, and the samples that could not be used. Where a
    launcher started several processes, they share the questions.

    Args:
        like: the result that is repeated, to compare with.

    Returns:
        False if the answers of ``like`` were not reproduced.

    Raises:
        ConfigError: the configuration names no evaluation sets, or an unfinished evaluation in the folder had another
            protocol.
        ServerError: the server that is to answer is away, is none, or cannot be asked so.
        TooManyBadSamples: no question of a set could be scored; everything is written before.
    """
    if not config.data.eval:
        raise ConfigError(
            "The configuration names no evaluation sets. Add them as data.eval.NAME=PATH, files of prepared records."
        )
    check_judge(config.eval.judge)
    quiet_libraries()
    use_threads(config.training.torch_threads)
    join_ranks()
    with RankWatch(RankLayout.here()) as watch:
        try:
            reproduced = _evaluate(config, Path(config.model.path) if checkpoint is None else checkpoint, like)
        except BaseException as error:
            watch.fail(error)
            raise
        disconnect()
    return reproduced


def _evaluate(config: RunConfig, path: Path, like: Path | None) -> bool:
    ranks = RankLayout.here()
    console = Console(enabled=ranks.is_rank0)
    start_seconds = time.monotonic()
    folder = _folder(config, path)
    if like is not None:
        folder = folder.with_name(f"{folder.name}-again")
        if like.resolve().parent == folder.resolve():
            folder = folder.with_name(f"{folder.name}-again")
    with ExitStack() as stack:
        by_server = config.rollout.engine == "server"
        policy = _without_weights(config, path) if by_server else _loaded(config, path, console)
        served = None
        if by_server:
            # With a tokenizer of its own: the server is asked in another thread than prompts are made in.
            served = ServerEvaluation(config, path, _without_weights(config, path), folder / "served", console.warn)
            for line in served.introduction():
                console.info(line)
        record = protocol_record(config, path, policy, None if served is None else served.record())
        opened = ranks.from_rank0(lambda: open_folder(folder, record, config.eval.resume, console.info))
        stack.callback(opened.close)
        folder.mkdir(parents=True, exist_ok=True)  # of another host
        results, records = _answer(config, policy, served, ranks, console, folder)
        if ranks.is_rank0:
            judge_answers(config.eval.judge, config.reward, folder, results, console)
        Meeting().wait()  # collectives would not wait for a judge
        seconds = round(time.monotonic() - start_seconds, 1)
        results["protocol"] = record | {"machines_before": opened.machines_before, "seconds": seconds}
        if not config.eval.lmms_samples:
            records = {}
        reproduced = ranks.from_rank0(lambda: _conclude(results, folder, console, like, records))
    _refuse_unscored(results, folder)
    return reproduced


def _loaded(config: RunConfig, path: Path, console: Console) -> Policy:
    policy = load_policy(path, device=local_device(), settings=config.model)
    console.info(f"model: {path}; attention kernel {policy.kernel.name} (checked: {policy.kernel_error:.0e})")
    console.info(f"positions: {policy.family.describe_positions(config.model.positions)}")
    if line := keep_features(policy, config.cache):
        console.info(line)
    return policy


def _without_weights(config: RunConfig, path: Path) -> WeightlessPolicy:
    return WeightlessPolicy(config.model.model_copy(update={"path": str(path)}))


def _conclude(
    results: dict[str, Any], folder: Path, console: Console, like: Path | None, lmms_samples: Mapping[str, Path]
) -> bool:
    """Write and print the result, and compare it with the one that it repeats; whether that was reproduced.

    ``lmms_samples``: the sets whose answers are also written as lmms-eval's, with their records.
    """
    write_json_atomic(folder / RESULT, results)
    (folder / PROTOCOL).unlink(missing_ok=True)
    for line in table(results):
        console.info(line)
    for name, records in lmms_samples.items():
        answered = read_answers(answers_path(folder, name))
        write_lmms_samples(folder / f"lmms_samples_{file_name(name)}.jsonl", answered, record_places(records))
    write_eval_report(folder)
    console.info(f"written to {folder}; look at {folder / 'report.html'}")
    if like is None:
        return True
    reproduced, lines = compared(like, folder / RESULT)
    for line in lines:
        console.info(line)
    return reproduced


def _answer(
    config: RunConfig,
    policy: Policy | WeightlessPolicy,
    served: ServerEvaluation | None,
    ranks: RankLayout,
    console: Console,
    folder: Path,
) -> tuple[dict[str, Any], dict[str, Path]]:
    """The figures, and the records of each set."""
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)
    data = config.data
    log = None
    if ranks.is_rank0:
        path = folder / "bad_samples.jsonl"
        log = BadSampleLog(path, data.max_bad_share, data.min_seen_for_bad_share, console.warn)

    def check(prompt: Prompt) -> None:
        policy.check_length(prompt, config.rollout.max_new_tokens)

    with (
        SourcePool(builder, data, config.media, policy.pixel_factor, check, cache=config.cache) as sources,
        Rewarder(config.reward, warn=console.warn) as rewarder,
        WholeReader(config.reward, console.warn) as whole,
    ):
        eval_model = EvalModel(policy, sources, rewarder, whole, ranks)
        if served is not None:
            eval_model = replace(eval_model, sampler_of=served.sampler, stop_asking=served.stop)
        evaluator = Evaluator(config, eval_model, console, log, _Pictures(config, folder))
        results = evaluator.run("answers", AnswerFiles(folder, ranks.rank))
        return results, {item.name: item.records for item in evaluator.sets}


class _Pictures:
    """What a question's row says of what was shown, and its frames as a picture for the first questions of a set."""

    def __init__(self, config: RunConfig, folder: Path):
        self._folder, self._limit = RunFolder(folder), config.eval.thumbnails
        self._frames = config.observe.thumbnails or 8

    def __call__(self, sample: Sample, prompt: Prompt, place: int) -> Mapping[str, Any]:
        strip = save_strip(self._folder, sample.sample_id, prompt, self._frames) if place < self._limit else None
        return {
            "shown": {
                "frames": [] if strip is None else [strip],
                "seconds": list(prompt.preview_seconds),
                "prompt_tokens": prompt.num_tokens,
                "visual_tokens": prompt.num_visual_tokens,
                "content": prompt.content_key,
            }
        }


def _refuse_unscored(results: dict[str, Any], folder: Path) -> None:
    """A script that asks only for the exit code must not take a set without a figure for a measured one."""
    unscored = [name for name, figures in results["sets"].items() if figures["accuracy"] is None]
    if unscored:
        raise TooManyBadSamples(
            f"No question of {', '.join(unscored)} could be scored. The cause of each is in "
            f"{folder / 'bad_samples.jsonl'}, where the questions were usable in the answers beside it. Repair the "
            "data, or leave the set out with eval.sets."
        )


def _folder(config: RunConfig, path: Path) -> Path:
    """Where results go; results of other weights, suites or sampling settings do not overwrite each other."""
    run, whole = Path(config.run.dir), path.resolve()
    is_own = run.resolve() in whole.parents
    # With a suite's configuration the run folder is not the checkpoint's, and all runs have checkpoints of one name.
    home = run if is_own else run_above(path) or run.parent
    sampling = config.eval
    suite = "" if is_own or not sampling.protocols or config.run.name == _NO_NAME else f"-{config.run.name}"
    goes_by_it = any(name not in sampling.protocols for name in sampling.chosen_sets(list(config.data.eval)))
    is_sampled = goes_by_it and sampling.temperature != 0
    suffix = f"-n{sampling.num_generations}-t{sampling.temperature:g}" if is_sampled else ""
    by_server = "-server" if config.rollout.engine == "server" else ""
    return home / f"eval-{path.name}{suite}{suffix}{by_server}"
