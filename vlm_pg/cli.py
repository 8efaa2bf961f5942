"""The command ``vlm-pg``. Nothing heavy is imported before a subcommand runs, so ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import vlm_pg
from vlm_pg.errors import EXIT_RANK_LOST, ConfigError, RankLost, VlmPgError

EXIT_OK, EXIT_NOT_READY, EXIT_NOT_EXACT, EXIT_TOO_LARGE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 1, 1, 2, 130
EXIT_BUG = 1
DEFAULT_RUN = "runs/embedded"

_EPILOG = """\
Overrides are KEY=VALUE with a dotted key and a YAML value, for example training.steps=5 or media.max_frames=32.
Relative paths, in config files too, are relative to the current directory.

exit codes:
  0    done
  1    a bug (with its traceback); or `doctor` found that a required part is missing; or `verify` that sharing
       is not exact; or `plan` that the run does not fit into memory
  2    something you can put right: a setting, a file, a model (one message, no traceback)
  75   another process of the run has gone or failed; one message says which
  130  stopped by Ctrl-C; `train` has written a checkpoint, from which run.resume=auto goes on (after SIGTERM and
       SIGUSR1 it has, too, and ends with 0)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Errors the user can put right are printed; bugs raise."""
    arguments = _parse(argv)
    # Here, so that --help has even less to import.
    from vlm_pg.files import file_errors_explained
    from vlm_pg.observe.text import visible

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
    except Exception:
        if not _is_connected():
            raise
        traceback.print_exc()
        code = EXIT_BUG
    if _is_connected():
        from vlm_pg.distributed import end_rank

        end_rank(code)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no overrides that follow an option ("eval CHECKPOINT --config CONFIG training.steps=5").
    if rest and not (hasattr(arguments, "overrides") and all(_is_override(word) for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlm-pg",
        description="GRPO for Qwen-VL on images and long video, with the visual prefix encoded once per group.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vlm-pg {vlm_pg.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.set_defaults(run=run)
        return command

    train = add("train", _train, "train with a config file")
    train.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/embedded.yaml")
    train.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the file's")

    prepare = add("prepare", _prepare, "turn a raw data set into prepared records; alone: list the data sets")
    prepare.add_argument("name", metavar="NAME", nargs="?", help="data set; without it they are listed")
    prepare.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="its own arguments; NAME --help lists them"
    )

    evaluate = add("eval", _eval, "measure rollout accuracy of a checkpoint or model")
    evaluate.add_argument(
        "target",
        metavar="CHECKPOINT",
        nargs="?",
        help=f"checkpoint, run folder or model folder (default: {DEFAULT_RUN})",
    )
    evaluate.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the config's")
    evaluate.add_argument(
        "--config", type=Path, help="YAML file (default: config.yaml of the run that CHECKPOINT belongs to)"
    )

    export = add("export", _export, "write a checkpoint as a plain transformers folder, adapters merged")
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint, or an adapter's folder")
    export.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet")
    export.add_argument("--dtype", choices=["fp32", "bf16"], help="default: as the weights are stored")

    report = add("report", _report, "write report.html of a run, finished or not")
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=f"run folder, for example {DEFAULT_RUN}")

    bench = add("bench", _bench, "measure what sharing the prefix and keeping frames save")
    bench.add_argument(
        "measurement",
        metavar="NAME",
        choices=["step", "rollout", "media", "figure", "model"],
        help="step: measure one group's forward and backward; rollout: measure generation; media: measure decoding and "
        "kept frames; figure: draw a file of the first two; model: what arithmetic alone says for public models",
    )
    bench.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="its own arguments; NAME --help lists them"
    )

    verify = add("verify", _verify, "compare shared with repeated computation on your own model and questions")
    verify.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/embedded.yaml")
    verify.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the file's")
    verify.add_argument("--questions", type=_count, default=2, metavar="N", help="questions to compare on (default: 2)")
    verify.add_argument(
        "--response-tokens", type=_count, default=64, metavar="R", help="longest response, in tokens (default: 64)"
    )

    plan = add("plan", _plan, "tell how much memory a run will take, and what fits; nothing is loaded")
    plan.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; without it, a table of Qwen2.5-VL's four sizes"
    )
    plan.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the file's")
    plan.add_argument("--gpu", type=_gib, default=80.0, metavar="GIB", help="memory of a GPU, in GiB (default: 80)")
    plan.add_argument("--gpus", type=_count, default=None, metavar="N", help="GPUs of the run (default: 8; torch: 1)")

    cache = add("cache", _cache, "fill, look at, check or empty the folder that keeps frames and visual features")
    cache.add_argument(
        "action",
        metavar="ACTION",
        choices=["fill", "stats", "verify", "prune"],
        help="fill: make what a CONFIG's records ask for; stats: count; verify: read every entry and remove the "
        "damaged; prune: throw out what was not used for longest",
    )
    cache.add_argument("target", metavar="CONFIG|FOLDER", type=Path, help="fill: a YAML file; else the cache's folder")
    cache.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the file's")
    cache.add_argument("--max-gb", type=float, metavar="GIB", help="of prune: what may stay")

    add("doctor", _doctor, "check what this machine offers, and say what to do about what is missing")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from vlm_pg.distributed import end_rank
    from vlm_pg.files import file_errors_explained
    from vlm_pg.training.main import train

    with file_errors_explained(Path(config.run.dir)):
        code = train(config)
    if "RANK" in os.environ:
        end_rank(code)
    return code


def _prepare(arguments: argparse.Namespace) -> int:
    from vlm_pg.cli_prepare import prepare

    return prepare(arguments.name, arguments.rest)


def _eval(arguments: argparse.Namespace) -> int:
    from vlm_pg.cli_eval import choose_evaluation
    from vlm_pg.config import load_config

    target, overrides = arguments.target, list(arguments.overrides)
    if target is not None and _is_override(target) and not Path(target).exists():
        target, overrides = None, [target, *overrides]
    chosen = choose_evaluation(target, arguments.config, DEFAULT_RUN)
    config = load_config(chosen.config, overrides)
    from vlm_pg.eval.main import evaluate

    evaluate(config, chosen.checkpoint)
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    from vlm_pg.observe.quiet import quiet_libraries
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
    from vlm_pg.observe.report import write_report
    from vlm_pg.observe.text import visible

    print(visible(str(write_report(arguments.run_dir))))
    return EXIT_OK


def _bench(arguments: argparse.Namespace) -> int:
    from importlib import import_module

    return int(import_module(f"vlm_pg.bench.{arguments.measurement}").main(arguments.rest) or EXIT_OK)


def _verify(arguments: argparse.Namespace) -> int:
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from vlm_pg.verify.main import verify

    return EXIT_OK if verify(config, arguments.questions, arguments.response_tokens) else EXIT_NOT_EXACT


def _cache(arguments: argparse.Namespace) -> int:
    if arguments.action == "fill":
        from vlm_pg.config import load_config

        config = load_config(arguments.target, arguments.overrides)
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
    from vlm_pg.plan.command import plan, print_published

    if arguments.config is None:
        print_published(arguments.gpu)
        return EXIT_OK
    from vlm_pg.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    gpus = arguments.gpus or (1 if config.training.engine == "torch" else 8)
    return EXIT_OK if plan(config, arguments.gpu, gpus) else EXIT_TOO_LARGE


def _gib(text: str) -> float:
    value = float(text)
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"{value:g} is no size of a GPU's memory; give GiB, such as 80")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a count; give 1 or more")
    return value


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
