"""The command ``vlm-pg``: its arguments and exit codes. ``commands.py`` runs the subcommands; nothing heavy is imported
before, so ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import vlm_pg
from vlm_pg.errors import EXIT_RANK_LOST, RankLost, VlmPgError

DEFAULT_RUN = "runs/embedded"
_Add = Callable[[str, str], argparse.ArgumentParser]
EXIT_BUG, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

_EPILOG = """\
Overrides are KEY=VALUE with a dotted key and a YAML value, for example training.steps=5 or media.max_frames=32.
Relative paths, in config files too, are relative to the current directory.

exit codes:
  0    done
  1    a bug (with its traceback); or `doctor` found that a required part is missing, or that a server does not
       fit the trainer; or `verify` that sharing is not exact; or `plan` that the run does not fit into memory; or
       `check` that records cannot be used; or `eval --like` that an answer is another one
  2    something you can put right: a setting, a file, a model (one message, no traceback)
  75   another process of the run has gone or failed; one message says which
  130  stopped by Ctrl-C; `train` has written a checkpoint, from which run.resume=auto goes on (after SIGTERM and
       SIGUSR1 it has, too, and ends with 0); the same `eval` or `sample` goes on where it was
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
_OUT_OF_MEMORY = (
    "The GPU's memory ran out (above: where, and what torch held). Generation takes less with rollout.memory_gb and "
    "rollout.prefill_tokens, an update with training.micro_batch_tokens, model.gradient_checkpointing=true, "
    "model.offload_layer_inputs=true and model.logits_chunk_mb; `vlm-pg plan` says what a configuration needs."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Errors the user can put right are printed; bugs raise."""
    arguments = _parse(argv)
    # Imported here, so that --help has even less to import.
    from vlm_pg import commands
    from vlm_pg.files import file_errors_explained
    from vlm_pg.observe.text import visible
    from vlm_pg.watch.launcher import watch_launcher

    watch_launcher()

    try:
        with file_errors_explained():
            return int(getattr(commands, arguments.command)(arguments))
    except VlmPgError as error:
        # It may quote files and servers.
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


def _rank_prefix() -> str:
    """ "[rank 3] " in a run of several processes, so that one rank's error can be distinguished from the others'."""
    return f"[rank {os.environ.get('RANK', '?')}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _is_connected() -> bool:
    """Whether this process has joined other ranks: its interpreter may then not end by itself."""
    if not _rank_prefix():
        return False
    from vlm_pg.distributed import is_distributed

    return is_distributed()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    beside: list[str] = []
    if words[:1] == ["serve"] and "--" in words:
        split = words.index("--")
        words, beside = words[:split], words[split + 1 :]
    arguments, rest = parser.parse_known_args(words)
    arguments.beside = beside
    # argparse takes no overrides that follow an option ("eval CHECKPOINT --config CONFIG training.steps=5").
    if rest and not (hasattr(arguments, "overrides") and all(map(_is_assignment, rest))):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    # An override instead of an optional argument ("check CONFIG training.steps=5", "eval training.steps=5").
    if arguments.command == "check" and arguments.data is not None and _is_override(arguments.config):
        arguments.overrides = [arguments.config, *arguments.overrides]
        arguments.data, arguments.config = None, arguments.data
    if arguments.command == "doctor" and arguments.config is not None and _is_override(arguments.config):
        arguments.config, arguments.overrides = None, [arguments.config, *arguments.overrides]
    if arguments.command == "eval" and arguments.target is not None and _is_override(arguments.target):
        arguments.target, arguments.overrides = None, [arguments.target, *arguments.overrides]
    return arguments


def _is_assignment(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _is_override(word: str) -> bool:
    return _is_assignment(word) and not Path(word).exists()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlm-pg",
        description="GRPO for Qwen-VL on images and long video, with the visual prefix encoded once per group.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vlm-pg {vlm_pg.__version__}")
    parser.set_defaults(default_run=DEFAULT_RUN)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.set_defaults(command=name)
        return command

    train = add("train", "train with a config file")
    train.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, for example configs/embedded.yaml")
    _add_overrides(train)

    serve = add("serve", "start the servers of rollout.server.launch, and stop them at the end")
    serve.usage = "vlm-pg serve [-h] [--dry-run] CONFIG [KEY=VALUE ...] [-- COMMAND ...]"
    serve.epilog = (
        "With COMMAND, it is run once all servers are healthy, on the GPUs that they leave, and its exit code is "
        "returned. For example: vlm-pg serve CONFIG -- vlm-pg train CONFIG"
    )
    serve.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of the run")
    _add_overrides(serve)
    serve.add_argument("--dry-run", action="store_true", help="print the servers' command lines and start nothing")

    _add_data(add)
    _add_sampling(add)
    _add_results(add)
    _add_measurements(add)
    _add_doctor(add)
    return parser


def _add_data(add: _Add) -> None:
    prepare = add("prepare", "turn a raw data set into prepared records; alone: list the data sets")
    prepare.add_argument("name", metavar="NAME", nargs="?", help="data set; without it they are listed")
    _add_rest(
        prepare,
        "its own arguments, which NAME --help lists; and --check CONFIG: look at what was prepared as vlm-pg check "
        "does, reports in OUT/check",
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


def _add_sampling(add: _Add) -> None:
    sample = add("sample", "sample and score responses to the training records")
    sample.add_argument("config", metavar="CONFIG", type=Path, help="YAML file: model, data.train, rollout, reward")
    _add_overrides(sample)
    sample.add_argument("--out", metavar="FOLDER", type=Path, help="default: samples in the run's folder")

    select = add("select", "make a supervised or preference set of sampled responses")
    select.add_argument(
        "samples", metavar="SAMPLES", type=Path, help="the folder of vlm-pg sample, or its samples.jsonl"
    )
    select.add_argument(
        "--records",
        metavar="[NAME=]RECORDS",
        action="append",
        default=[],
        help="records that were sampled, once for each set (default: as SAMPLES' protocol.json says)",
    )
    select.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a folder that does not exist yet")
    select.add_argument(
        "--pairs", action="store_true", help="preference pairs: a right response as chosen, a wrong one as rejected"
    )
    select.add_argument(
        "--min-accuracy", type=float, default=1.0, metavar="A", help="accuracy of a right response (default: 1)"
    )
    select.add_argument(
        "--difficulty",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="only questions whose share of right responses (p_correct) lies within",
    )
    select.add_argument(
        "--per-question",
        type=_count,
        metavar="N",
        help="at most N responses (pairs) of a question, in an order drawn from --seed (default: all)",
    )
    select.add_argument("--min-tokens", type=_count, default=1, metavar="N", help="shortest response")
    select.add_argument("--max-tokens", type=_count, metavar="N", help="longest response")
    select.add_argument("--seed", type=int, default=0, metavar="S", help="of --per-question (default: 0)")


def _add_results(add: _Add) -> None:
    evaluate = add("eval", "measure rollout accuracy of a checkpoint or model")
    evaluate.epilog, evaluate.formatter_class = _EVAL_EPILOG, argparse.RawDescriptionHelpFormatter
    evaluate.add_argument(
        "target",
        metavar="CHECKPOINT",
        nargs="?",
        help=f"checkpoint, run folder or model folder (default: {DEFAULT_RUN})",
    )
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
    bench = add("bench", "measure what sharing the prefix saves")
    bench.add_argument(
        "measurement",
        metavar="NAME",
        choices=["step", "rollout"],
        help="step: measure one group's forward and backward; rollout: measure generation",
    )
    _add_rest(bench, "its own arguments; NAME --help lists them")

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


def _add_doctor(add: _Add) -> None:
    doctor = add("doctor", "check this machine, or with --server a sampling server, and say what to do about faults")
    doctor.add_argument("--server", metavar="URL", help="check the contract between the trainer and this server")
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="with --server: YAML file of the run")
    _add_overrides(doctor)
    doctor.add_argument("--model", metavar="PATH", help="with --server, instead of CONFIG: the model that is trained")
    doctor.add_argument(
        "--update",
        action="store_true",
        help="with --server: load changed weights into the server, and the model's own at the end; not during a run",
    )


def _add_overrides(command: argparse.ArgumentParser, whose: str = "file") -> None:
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=f"settings that override the {whose}'s")


def _add_rest(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help=text)


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


if __name__ == "__main__":
    sys.exit(main())
