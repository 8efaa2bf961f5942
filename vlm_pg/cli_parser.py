"""What the command ``vlm-pg`` can be asked: its subcommands, family by family, and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import vlm_pg

DEFAULT_RUN = "runs/embedded"
Run = Callable[[argparse.Namespace], int]
_Add = Callable[[str, str], argparse.ArgumentParser]

_EPILOG = """\
Overrides are KEY=VALUE with a dotted key and a YAML value, for example training.steps=5 or media.max_frames=32.
Relative paths, in config files too, are relative to the current directory.

exit codes:
  0    done
  1    a bug (with its traceback); or `doctor` found that a required part is missing; or `verify` that sharing
       is not exact; or `plan` that the run does not fit into memory; or `check` that records cannot be used;
       or `eval --like` that an answer is another one
  2    something you can put right: a setting, a file, a model (one message, no traceback)
  75   another process of the run has gone or failed; one message says which
  130  stopped by Ctrl-C; `train` has written a checkpoint, from which run.resume=auto goes on (after SIGTERM and
       SIGUSR1 it has, too, and ends with 0); the same `eval` goes on where it was
"""
_EVAL_EPILOG = """\
settings that are often given:
  eval.num_generations=8 eval.temperature=1.0   answers to each question, and how they are sampled
  data.eval.NAME=FILE, eval.sets=[NAME, ...]    another set of prepared records; which sets are asked
  eval.limit=100                                the first questions of each set (null: all)
  eval.protocols.NAME=video_mme/official        ask, sample, read and average as published, or by a YAML file of yours
  eval.reader=ours                              who reads answers: strict, ours, published
  eval.judge.url=URL                            a model that is asked where rules are not enough
  rollout.engine=server rollout.server.url=URL  answers of a server

examples:
  vlm-pg eval runs/NAME eval.num_generations=8 eval.temperature=1.0
  vlm-pg eval runs/NAME/checkpoints/step-000100 --config configs/eval/video_r1.yaml eval.sets=[video_mme]
"""


def parser_of(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """The parser, whose result has what to run as ``run``.

    Args:
        runs: what runs each subcommand, by its name.
    """
    parser = argparse.ArgumentParser(
        prog="vlm-pg",
        description="GRPO for Qwen-VL on images and long video, with the visual prefix encoded once per group.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vlm-pg {vlm_pg.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.set_defaults(run=runs[name])
        return command

    _add_train(add)
    _add_data(add)
    _add_results(add)
    _add_measurements(add)
    _add_cache(add)
    add("doctor", "check what this machine offers, and say what to do about what is missing")
    return parser


def _add_train(add: _Add) -> None:
    train = add("train", "train with a config file")
    train.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/embedded.yaml")
    _add_overrides(train)


def _add_data(add: _Add) -> None:
    """What is done with records before a run."""
    prepare = add("prepare", "turn a raw data set into prepared records; alone: list the data sets")
    prepare.add_argument("name", metavar="NAME", nargs="?", help="data set; without it they are listed")
    prepare.add_argument(
        "rest",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="its own arguments, which NAME --help lists; and --check CONFIG: look at what was prepared as vlm-pg "
        "check does, reports in OUT/check",
    )

    check = add("check", "look at every record, medium and prompt before training on them")
    check.add_argument(
        "data", metavar="DATA", nargs="?", help="a file or folder of records (default: the configuration's own sets)"
    )
    check.add_argument("config", metavar="CONFIG", help="YAML file, under which records are checked")
    _add_overrides(check)
    check.add_argument("--decode", action="store_true", help="decode all that is shown of media, into the cache if any")
    check.add_argument(
        "--out", metavar="FOLDER", type=Path, help="where check.json, check.html, refused.jsonl, warned.jsonl go"
    )


def _add_results(add: _Add) -> None:
    """What is done with what a run has made."""
    evaluate = add("eval", "measure rollout accuracy of a checkpoint or model")
    evaluate.add_argument(
        "target",
        metavar="CHECKPOINT",
        nargs="?",
        help=f"checkpoint, run folder or model folder (default: {DEFAULT_RUN})",
    )
    evaluate.epilog, evaluate.formatter_class = _EVAL_EPILOG, argparse.RawDescriptionHelpFormatter
    _add_overrides(evaluate, "config")
    evaluate.add_argument(
        "--config", type=Path, help="YAML file (default: config.yaml of the run that CHECKPOINT belongs to)"
    )
    evaluate.add_argument(
        "--like", metavar="RESULT", type=Path, help="repeat the evaluation of a result.json, and say what is not equal"
    )

    evaluate.add_argument(
        "--prompts", metavar="SET", help="ask nothing: write the words, frames and settings of a set (needs --config)"
    )

    score = add("score", "score outputs that were made elsewhere")
    score.add_argument("records", metavar="SET", type=Path, help="a prepared set, for example data/video_mme:eval")
    score.add_argument(
        "outputs",
        metavar="OUTPUTS",
        type=Path,
        help="question id -> text (.json), lines with id and output (.jsonl), or a samples file of lmms-eval",
    )
    score.add_argument(
        "--protocol", metavar="NAME", help="for example video_mme/lmms (default: the set's official one)"
    )
    score.add_argument(
        "--reader",
        choices=["ours", "published"],
        help="published: the rule that the protocol names (default: ours, unless the protocol names one of yours)",
    )
    score.add_argument("--doc-key", metavar="KEY", help="where lmms-eval's doc holds the question's id")
    score.add_argument(
        "--judge", metavar="URL", help="a model behind an OpenAI-compatible URL, asked where the rules are not enough"
    )
    score.add_argument("--judge-model", metavar="NAME", help="default: the first model that the judge's server lists")
    score.add_argument(
        "--judge-key-variable", metavar="NAME", help="environment variable with its key (default: OPENAI_API_KEY)"
    )
    score.add_argument("--out", metavar="FOLDER", type=Path, help="default: scored-NAME beside OUTPUTS")

    export = add("export", "write a checkpoint as a plain transformers folder, adapters merged")
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint, or an adapter's folder")
    export.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet")
    export.add_argument("--dtype", choices=["fp32", "bf16"], help="default: as the weights are stored")

    report = add("report", "write report.html of a run, finished or not, or of an evaluation")
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=f"run folder, for example {DEFAULT_RUN}")
    report.add_argument(
        "--compare", metavar="FOLDER", type=Path, nargs="+", default=[], help="other evaluations beside this one"
    )
    report.add_argument(
        "--steps", metavar="FOLDER", type=Path, nargs="+", default=[], help="evaluations of the run's other checkpoints"
    )


def _add_measurements(add: _Add) -> None:
    """What sharing saves, whether it is exact, what fits."""
    bench = add("bench", "measure what sharing the prefix saves")
    bench.add_argument(
        "measurement",
        metavar="NAME",
        choices=["step", "rollout"],
        help="step: measure one group's forward and backward; rollout: measure generation",
    )
    bench.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="its own arguments; NAME --help lists them"
    )

    verify = add("verify", "compare shared with repeated computation on your own model and questions")
    verify.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/embedded.yaml")
    _add_overrides(verify)
    verify.add_argument("--questions", type=_count, default=2, metavar="N", help="questions to compare on (default: 2)")
    verify.add_argument(
        "--response-tokens", type=_count, default=64, metavar="R", help="longest response, in tokens (default: 64)"
    )

    plan = add("plan", "tell how much memory a run will take, and what fits; nothing is loaded")
    plan.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; without it, a table of Qwen2.5-VL's four sizes"
    )
    _add_overrides(plan)
    plan.add_argument("--gpu", type=_gib, default=80.0, metavar="GIB", help="memory of a GPU, in GiB (default: 80)")
    plan.add_argument("--gpus", type=_count, default=None, metavar="N", help="GPUs of the run (default: 8; torch: 1)")


def _add_cache(add: _Add) -> None:
    cache = add("cache", "fill, look at, check or empty the folder that keeps frames and visual features")
    cache.add_argument(
        "action",
        metavar="ACTION",
        choices=["fill", "stats", "verify", "prune"],
        help="fill: make what a CONFIG's records ask for; stats: count; verify: read every entry and remove the "
        "damaged; prune: throw out what was not used for longest",
    )
    cache.add_argument("target", metavar="CONFIG|FOLDER", type=Path, help="fill: a YAML file; else the cache's folder")
    _add_overrides(cache)
    cache.add_argument("--max-gb", type=float, metavar="GIB", help="of prune: what may stay")


def _add_overrides(command: argparse.ArgumentParser, whose: str = "file") -> None:
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=f"settings that override the {whose}'s")


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
