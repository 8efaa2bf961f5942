"""The command ``vlm-pg``. Nothing heavy is imported before a subcommand runs, so ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from vlm_pg.cli_parser import DEFAULT_RUN, parser_of
from vlm_pg.errors import EXIT_RANK_LOST, ConfigError, RankLost, VlmPgError
from vlm_pg.imports import imported_at_once

EXIT_OK, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 2, 130
EXIT_NOT_READY = EXIT_NOT_EXACT = EXIT_TOO_LARGE = EXIT_FOUND = EXIT_BUG = 1

_OUT_OF_MEMORY = (
    "The GPU's memory ran out (above: where, and what torch held). Generation takes less with rollout.memory_gb and "
    "rollout.prefill_tokens, an update with training.micro_batch_tokens, model.gradient_checkpointing=true, "
    "model.offload_layer_inputs=true and model.logits_chunk_mb; `vlm-pg plan` says what a configuration needs."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Errors the user can put right are printed; bugs raise."""
    arguments = _parse(argv)
    # Here, so that --help has even less to import.
    from vlm_pg.files import file_errors_explained
    from vlm_pg.observe.text import visible
    from vlm_pg.watch.launcher import watch_launcher

    watch_launcher()

    try:
        with file_errors_explained():
            return arguments.run(arguments)
    except VlmPgError as error:
        # Names and answers in it are those of files and servers.
        print(visible(f"{_rank_prefix()}vlm-pg: error: {error}"), file=sys.stderr)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{_rank_prefix()}vlm-pg: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except RankLost:
        code = EXIT_RANK_LOST
    except Exception as error:
        out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, which may not be imported
        if not _is_connected() and not out_of_memory:
            raise
        traceback.print_exc()
        if out_of_memory:
            print(f"{_rank_prefix()}vlm-pg: error: {_OUT_OF_MEMORY}", file=sys.stderr)
        code = EXIT_BUG
    if _is_connected():
        from vlm_pg.distributed import end_rank

        end_rank(code)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        {
            "train": _train,
            "prepare": _prepare,
            "check": _check,
            "eval": _eval,
            "score": _score,
            "export": _export,
            "report": _report,
            "bench": _bench,
            "verify": _verify,
            "plan": _plan,
            "cache": _cache,
            "doctor": _doctor,
        }
    )
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no overrides that follow an option ("eval CHECKPOINT --config CONFIG training.steps=5").
    if rest and not (hasattr(arguments, "overrides") and all(_is_override(word) for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _let_segments_grow() -> None:
    """Token streams differ in length from step to step: blocks of fixed segments would fit few of them.

    torch reads this when it first needs memory of a GPU.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _train(arguments: argparse.Namespace) -> int:
    _let_segments_grow()
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from vlm_pg.cli_data import check_evaluation_data, check_training_data
    from vlm_pg.files import file_errors_explained

    check_training_data(config)
    if config.eval.before or config.eval.after or config.eval.every:
        check_evaluation_data(config)
    with imported_at_once():
        from vlm_pg.training.main import train

    with file_errors_explained(Path(config.run.dir)):
        code = train(config)
    return _ended(code)


def _prepare(arguments: argparse.Namespace) -> int:
    from vlm_pg.cli_checked import split
    from vlm_pg.cli_prepare import prepare

    own, checked = split(arguments.rest)
    code = prepare(arguments.name, own)
    if code or checked is None:
        return code
    return EXIT_OK if checked.check() else EXIT_FOUND


def _check(arguments: argparse.Namespace) -> int:
    from vlm_pg.config import load_config

    data, path, overrides = arguments.data, arguments.config, list(arguments.overrides)
    if data is not None and _is_override(path) and not Path(path).exists():
        data, path, overrides = None, data, [path, *overrides]
    config = load_config(path, overrides)
    from vlm_pg.cli_data import check_evaluation_data, check_training_data

    data = None if data is None else Path(data)
    if data is None:
        check_training_data(config)
        check_evaluation_data(config)
    from vlm_pg.check.command import check

    return EXIT_OK if check(config, data, arguments.decode, arguments.out) else EXIT_FOUND


def _eval(arguments: argparse.Namespace) -> int:
    _let_segments_grow()
    from vlm_pg.cli_data import check_evaluation_data
    from vlm_pg.cli_eval import choose_evaluation
    from vlm_pg.config import load_config

    target, overrides = arguments.target, list(arguments.overrides)
    if target is not None and _is_override(target) and not Path(target).exists():
        target, overrides = None, [target, *overrides]
    if arguments.prompts is not None:
        return _eval_prompts(arguments.prompts, arguments.config, target, overrides)
    if arguments.like is not None:
        return _eval_like(arguments.like, target, arguments.config, overrides)
    chosen = choose_evaluation(target, arguments.config, DEFAULT_RUN)
    config = load_config(chosen.config, overrides)
    check_evaluation_data(config)
    with imported_at_once():
        from vlm_pg.eval.main import evaluate

    evaluate(config, chosen.checkpoint)
    return _ended(EXIT_OK)


def _ended(code: int) -> int:
    """The exit code; a rank that has met others ends here, for its interpreter may not come to its end by itself."""
    if "RANK" in os.environ:
        from vlm_pg.distributed import end_rank

        end_rank(code)
    return code


def _eval_like(result: Path, target: str | None, config_path: Path | None, overrides: list[str]) -> int:
    if target is not None or config_path is not None:
        raise ConfigError(
            "--like repeats an evaluation as its result says, with its checkpoint and configuration. Leave CHECKPOINT "
            "and --config out; paths that have changed are given as key=value."
        )
    from vlm_pg.config import config_of

    with imported_at_once():
        from vlm_pg.eval.main import evaluate
        from vlm_pg.eval.record import read_record

    record = read_record(result)
    config = config_of(record["config"], result, overrides)
    # A model that was named in the configuration may be named anew.
    own = record["checkpoint"] == record["config"]["model"]["path"]
    is_equal = evaluate(config, None if own else Path(record["checkpoint"]), result)
    return _ended(EXIT_OK if is_equal else EXIT_NOT_EXACT)


def _eval_prompts(name: str, config_path: Path | None, target: str | None, overrides: list[str]) -> int:
    from vlm_pg.config import load_config
    from vlm_pg.observe.text import visible

    path = config_path or (None if target is None else Path(target))
    if path is None:
        raise ConfigError(
            "--prompts writes what would be asked of a set, as a configuration says. Give it with --config CONFIG, for "
            "example configs/eval/video_r1.yaml."
        )
    config = load_config(path, [*overrides, f"eval.sets=[{name}]"])
    from vlm_pg.eval.prompts_only import write_prompts

    for written in write_prompts(config, Path(config.run.dir) / "prompts").values():
        print(visible(f"{written.path}: {written.asked:,} questions, {written.faults:,} of them cannot be asked"))
        if written.not_asked or written.unreadable:
            print(visible(f"left out: {written.not_asked:,} of other types, {written.unreadable:,} unusable records"))
    return EXIT_OK


def _score(arguments: argparse.Namespace) -> int:
    from vlm_pg.eval.judging.command import judge_of
    from vlm_pg.eval.score_command import Scoring, score

    names = ("records", "outputs", "protocol", "reader", "doc_key", "out")
    judge = judge_of(arguments.judge, arguments.judge_model, arguments.judge_key_variable)
    score(Scoring(**{name: getattr(arguments, name) for name in names}, judge=judge))
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    from vlm_pg.observe.console import quiet_libraries
    from vlm_pg.observe.text import visible
    from vlm_pg.training.export import export

    quiet_libraries()
    print(visible(export(arguments.checkpoint, arguments.out, arguments.dtype)))
    return EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    if not arguments.run_dir.is_dir():
        raise ConfigError(
            f"{arguments.run_dir} is not a folder. A report is written from a run's folder. "
            f"Give one, for example {DEFAULT_RUN}."
        )
    from vlm_pg.observe.text import visible

    if (arguments.run_dir / "result.json").is_file():
        from vlm_pg.eval.report import write_eval_report

        written = write_eval_report(arguments.run_dir, compare=arguments.compare, checkpoints=arguments.steps)
        from vlm_pg.eval.compare import comparison_lines

        for line in comparison_lines(arguments.run_dir, arguments.compare):
            print(visible(line))
        print(visible(str(written)))
        return EXIT_OK
    if arguments.compare or arguments.steps:
        raise ConfigError(
            f"{arguments.run_dir} has no result.json. --compare and --steps are for the folders of evaluations, such "
            f"as {DEFAULT_RUN}/eval-step-000100. Give one."
        )
    from vlm_pg.observe.report import write_report

    print(visible(str(write_report(arguments.run_dir))))
    return EXIT_OK


def _bench(arguments: argparse.Namespace) -> int:
    from importlib import import_module

    with imported_at_once():
        measurement = import_module(f"vlm_pg.bench.{arguments.measurement}")
    return int(measurement.main(arguments.rest) or EXIT_OK)


def _verify(arguments: argparse.Namespace) -> int:
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from vlm_pg.cli_data import check_training_data

    check_training_data(config)
    with imported_at_once():
        from vlm_pg.verify.main import verify

    return EXIT_OK if verify(config, arguments.questions, arguments.response_tokens) else EXIT_NOT_EXACT


def _cache(arguments: argparse.Namespace) -> int:
    if arguments.action == "fill":
        from vlm_pg.config import load_config

        config = load_config(arguments.target, arguments.overrides)
        with imported_at_once():
            from vlm_pg.training.cache_fill import fill

        fill(config)
        return EXIT_OK
    from vlm_pg.cache import command

    if arguments.action == "stats":
        command.print_stats(arguments.target)
    elif arguments.action == "verify":
        command.print_verified(arguments.target)
    elif arguments.max_gb is None or arguments.max_gb < 0:
        raise ConfigError("prune needs --max-gb. The GiB that may stay are expected, 0 to empty the cache. Give it.")
    else:
        command.print_pruned(arguments.target, arguments.max_gb)
    return EXIT_OK


def _plan(arguments: argparse.Namespace) -> int:
    with imported_at_once():
        from vlm_pg.plan.command import plan, print_published

    if arguments.config is None:
        print_published(arguments.gpu)
        return EXIT_OK
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    gpus = arguments.gpus or (1 if config.training.engine == "torch" else 8)
    return EXIT_OK if plan(config, arguments.gpu, gpus) else EXIT_TOO_LARGE


def _doctor(arguments: argparse.Namespace) -> int:
    from vlm_pg.doctor import run_doctor

    return EXIT_OK if run_doctor() else EXIT_NOT_READY


def _rank_prefix() -> str:
    """ "[rank 3] " in a run of several processes, so that one rank's error can be told from the others'."""
    return f"[rank {os.environ.get('RANK', '?')}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _is_connected() -> bool:
    """Whether this process has met others: its interpreter may not come to its end by itself then."""
    if not _rank_prefix():
        return False
    from vlm_pg.distributed import is_distributed

    return is_distributed()


if __name__ == "__main__":
    sys.exit(main())
