"""The subcommands of ``vlm-pg``: each function takes the parsed arguments and returns the exit code.

A function imports what it needs, after all checks that need less.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import gc
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.errors import CheckpointError, ConfigError
from vlm_pg.files import file_errors_explained
from vlm_pg.observe.text import visible

if TYPE_CHECKING:
    from vlm_pg.config import RunConfig

EXIT_OK = 0
EXIT_NOT_READY = EXIT_NOT_EXACT = EXIT_TOO_LARGE = EXIT_FOUND = 1
CHECKPOINTS, REPORT, PIPELINES = "checkpoints", "report.json", "data_pipelines"
_EVAL_TARGETS = "Give a checkpoint, a run's folder, or a model folder together with --config CONFIG."


@contextmanager
def imported_at_once() -> Iterator[None]:
    """Pause the garbage collector during a command's imports, and freeze the imported objects afterwards.

    Libraries create hundreds of thousands of objects; scanning them takes a sixth of the start. No effect if torch is
    imported already, since this process is then not a command's own. Nothing is frozen if torch is still to come: it
    would be little, and ``bench paper`` freezes everything itself during its counts.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if "torch" in sys.modules:
            gc.freeze()
            # Objects still frozen at exit count as leaked, which some libraries report.
            atexit.register(gc.unfreeze)
        gc.enable()


def train(arguments: argparse.Namespace) -> int:
    _use_expandable_segments()
    config = _config(arguments.config, arguments.overrides)
    check_data(config, train=True, evaluation=bool(config.eval.before or config.eval.after or config.eval.every))
    with imported_at_once():
        from vlm_pg.training.main import train

    with file_errors_explained(Path(config.run.dir)):
        code = train(config)
    return _end_rank(code)


def prepare(arguments: argparse.Namespace) -> int:
    """Run a data pipeline, and with --check CONFIG check what it prepared as a run's configuration would use it."""
    parser = argparse.ArgumentParser(prog="vlm-pg prepare NAME", add_help=False, allow_abbrev=False)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--out", type=Path)
    known, rest = parser.parse_known_args(arguments.rest)
    if known.check is None:
        return run_pipeline(arguments.name, arguments.rest)
    if known.out is None:
        raise ConfigError("--check is given without --out. What is written there is checked. Give both.")
    if not known.check.is_file():  # reported before hours of work, not after
        raise ConfigError(
            f"--check names '{known.check}', which is no file. A run's YAML file is expected. Correct it."
        )
    code = run_pipeline(arguments.name, [*rest, "--out", str(known.out)])
    if code:
        return code
    from vlm_pg.check.command import check

    is_usable = check(_config_of_prepared(_config(known.check), known.out), out=known.out / "check")
    return EXIT_OK if is_usable else EXIT_FOUND


def check(arguments: argparse.Namespace) -> int:
    data, config = arguments.data, _config(arguments.config, arguments.overrides)
    if data is None:
        check_data(config, train=True, evaluation=True)
    from vlm_pg.check.command import check

    is_usable = check(config, None if data is None else Path(data), arguments.decode, arguments.out)
    return EXIT_OK if is_usable else EXIT_FOUND


def eval(arguments: argparse.Namespace) -> int:
    _use_expandable_segments()
    target, overrides = arguments.target, list(arguments.overrides)
    if arguments.prompts is not None:
        return _eval_prompts(arguments.prompts, arguments.config, target, overrides)
    if arguments.like is not None:
        return _eval_like(arguments.like, target, arguments.config, overrides)
    config_path, checkpoint = _choose_evaluation(target, arguments.config, arguments.default_run)
    config = _config(config_path, overrides)
    check_data(config, evaluation=True)
    with imported_at_once():
        from vlm_pg.eval.main import evaluate

    evaluate(config, checkpoint)
    return _end_rank(EXIT_OK)


def sample(arguments: argparse.Namespace) -> int:
    _use_expandable_segments()
    from vlm_pg.config import load_sampling_config

    config = load_sampling_config(arguments.config, arguments.overrides)
    check_data(config, train=True)
    with imported_at_once():
        from vlm_pg.eval.sample_command import sample

    sample(config, arguments.out)
    return _end_rank(EXIT_OK)


def select(arguments: argparse.Namespace) -> int:
    from vlm_pg.data.selection import Selection, records_of, select

    names = ("pairs", "min_accuracy", "difficulty", "per_question", "min_tokens", "max_tokens", "seed")
    data = records_of(arguments.samples, arguments.records)
    for line in select(arguments.samples, data, arguments.out, Selection(**{n: getattr(arguments, n) for n in names})):
        print(visible(line))
    return EXIT_OK


def score(arguments: argparse.Namespace) -> int:
    from vlm_pg.eval.judging.judge import judge_of_arguments
    from vlm_pg.eval.score_command import Scoring, score

    names = ("records", "outputs", "protocol", "reader", "doc_key", "out")
    judge = judge_of_arguments(arguments.judge, arguments.judge_model, arguments.judge_key_variable)
    score(Scoring(**{name: getattr(arguments, name) for name in names}, judge=judge))
    return EXIT_OK


def export(arguments: argparse.Namespace) -> int:
    from vlm_pg.observe.console import quiet_libraries
    from vlm_pg.training.export import export

    quiet_libraries()
    print(visible(export(arguments.checkpoint, arguments.out, arguments.dtype)))
    return EXIT_OK


def report(arguments: argparse.Namespace) -> int:
    if not arguments.run_dir.is_dir():
        raise ConfigError(
            f"{arguments.run_dir} is not a folder. A report is written from a run's folder. "
            f"Give one, for example {arguments.default_run}."
        )
    if (arguments.run_dir / "result.json").is_file():
        from vlm_pg.eval.report.page import write_eval_report

        written = write_eval_report(arguments.run_dir, compare=arguments.compare, checkpoints=arguments.steps)
        from vlm_pg.eval.figure_lines import comparison_lines

        for line in comparison_lines(arguments.run_dir, arguments.compare):
            print(visible(line))
        print(visible(str(written)))
        return EXIT_OK
    if arguments.compare or arguments.steps:
        raise ConfigError(
            f"{arguments.run_dir} has no result.json. --compare and --steps are for the folders of evaluations, such "
            f"as {arguments.default_run}/eval-step-000100. Give one."
        )
    from vlm_pg.observe.report.page import write_report

    print(visible(str(write_report(arguments.run_dir))))
    return EXIT_OK


def bench(arguments: argparse.Namespace) -> int:
    with imported_at_once():
        measurement = importlib.import_module(f"vlm_pg.bench.{arguments.measurement}")
    return int(measurement.main(arguments.rest) or EXIT_OK)


def verify(arguments: argparse.Namespace) -> int:
    config = _config(arguments.config, arguments.overrides)
    check_data(config, train=True)
    with imported_at_once():
        from vlm_pg.verify.main import verify

    return EXIT_OK if verify(config, arguments.questions, arguments.response_tokens) else EXIT_NOT_EXACT


def serve(arguments: argparse.Namespace) -> int:
    config = _config(arguments.config, arguments.overrides)
    launch = config.rollout.server.launch
    if launch is None:
        raise ConfigError(
            f"{arguments.config} has no rollout.server.launch, which says what servers to start. Set it, for example "
            "rollout.server.launch={num_servers: 4} with rollout.engine=server and "
            "rollout.server.url=http://127.0.0.1:8000/v1 (docs/servers.md)."
        )
    from vlm_pg.rollout.server.launch import VISIBLE, divide_gpus, server_commands, visible_gpus
    from vlm_pg.rollout.server.supervise import serve

    shared = config.rollout.server.sleep
    of_servers, of_training = divide_gpus(visible_gpus(), launch, trains=bool(arguments.beside), shared=shared)
    sections = config.model, config.media, config.prompt, config.rollout
    commands = server_commands(*sections, config.run.seed, of_servers)
    if arguments.dry_run:
        print("\n".join(map(str, commands)))
        return EXIT_OK
    # Not in the run's folder, which training moves aside at the start of a new run.
    folder = Path(f"{config.run.dir}-servers")
    environment = {VISIBLE: ",".join(of_training)} if of_servers else {}
    log = lambda line: print(visible(f"vlm-pg serve: {line}"), flush=True)  # noqa: E731
    return serve(commands, folder, launch.start_seconds, arguments.beside, environment, log)


def plan(arguments: argparse.Namespace) -> int:
    with imported_at_once():
        from vlm_pg.plan.command import plan, print_published

    if arguments.config is None:
        print_published(arguments.gpu)
        return EXIT_OK
    config = _config(arguments.config, arguments.overrides)
    gpus = arguments.gpus or (1 if config.training.engine == "torch" else 8)
    return EXIT_OK if plan(config, arguments.gpu, gpus) else EXIT_TOO_LARGE


def cache(arguments: argparse.Namespace) -> int:
    if arguments.action == "fill":
        config = _config(arguments.target, arguments.overrides)
        with imported_at_once():
            from vlm_pg.training.cache_fill import fill

        fill(config)
        return EXIT_OK
    from vlm_pg.cache import store

    if arguments.action == "stats":
        store.print_stats(arguments.target)
    elif arguments.action == "verify":
        store.print_verified(arguments.target)
    elif arguments.max_gb is None or arguments.max_gb < 0:
        raise ConfigError("prune needs --max-gb. The GiB that may stay are expected, 0 to empty the cache. Give it.")
    else:
        store.print_pruned(arguments.target, arguments.max_gb)
    return EXIT_OK


def doctor(arguments: argparse.Namespace) -> int:
    from vlm_pg.doctor import print_findings, run_doctor

    config_path, model = arguments.config, arguments.model
    if arguments.server is None:
        if config_path or model or arguments.overrides or arguments.update:
            raise ConfigError(
                "CONFIG, --model, --update and KEY=VALUE go with --server URL. Give it, or leave them out."
            )
        return EXIT_OK if run_doctor() else EXIT_NOT_READY
    if (config_path is None) == (model is None):
        raise ConfigError("--server needs the model that is trained: give either CONFIG or --model PATH.")
    of_server = ("rollout.engine=server", f"rollout.server.url={arguments.server}", "rollout.server.replicas=[]")
    overrides = [*arguments.overrides, *of_server]
    if config_path is not None:
        config = _config(config_path, overrides)
    else:
        from vlm_pg.config import config_of

        config = config_of({"model": {"path": model}, "training": {"steps": 1}}, Path("--model"), overrides)
    try:
        with imported_at_once():
            from vlm_pg.observe.console import quiet_libraries
            from vlm_pg.rollout.server.contract import check_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--server needs the package {error.name}. Install it with: pip install 'vlm-pg[server]'."
        ) from error
    quiet_libraries()
    checks = check_server(config.model, config.rollout, config.run.seed, Path(config.run.dir), arguments.update)
    passed, failed = "The server fits this trainer.", "The server does not fit this trainer, see above."
    return EXIT_OK if print_findings(checks, passed, failed) else EXIT_NOT_READY


def _config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    from vlm_pg.config import load_config

    return load_config(path, overrides)


def _use_expandable_segments() -> None:
    """Token streams differ in length from step to step, and few fit into blocks of fixed segments.

    torch reads this when it first needs memory of a GPU.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _end_rank(code: int) -> int:
    """The exit code; a rank that has joined others ends here, since its interpreter may not end by itself."""
    if "RANK" in os.environ:
        from vlm_pg.distributed import end_rank

        end_rank(code)
    return code


def check_data(config: RunConfig, train: bool = False, evaluation: bool = False) -> None:
    """Check the sets of ``data.train``, and the chosen ones of ``data.eval``, before anything slow is imported.

    Raises:
        ConfigError: a file or split is missing, unreadable at its beginning, or without records.
    """
    from vlm_pg.data.records import refuse_no_records

    sets: dict[str, Path] = {}
    if train:
        sets |= {".".join(filter(None, ("data.train", name))): path for name, path in config.data.train_sets.items()}
    if evaluation:
        chosen = config.eval.chosen_sets(list(config.data.eval))
        sets |= {f"data.eval.{name}": config.data.eval[name] for name in chosen}
    for key, path in sets.items():
        try:
            refuse_no_records(path)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error


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
    # The model that the configuration names may have another path now.
    own = record["checkpoint"] == record["config"]["model"]["path"]
    is_equal = evaluate(config, None if own else Path(record["checkpoint"]), result)
    return _end_rank(EXIT_OK if is_equal else EXIT_NOT_EXACT)


def _eval_prompts(name: str, config_path: Path | None, target: str | None, overrides: list[str]) -> int:
    path = config_path or (None if target is None else Path(target))
    if path is None:
        raise ConfigError(
            "--prompts writes the prompts of a set, as a configuration says. Give it with --config CONFIG, for example "
            "configs/eval/video_r1.yaml."
        )
    config = _config(path, [*overrides, f"eval.sets=[{name}]"])
    from vlm_pg.eval.prompts_only import write_prompts

    for written in write_prompts(config, Path(config.run.dir) / "prompts").values():
        print(visible(f"{written.path}: {written.asked:,} questions, {written.faults:,} of them cannot be asked"))
        if written.not_asked or written.unreadable:
            print(visible(f"left out: {written.not_asked:,} of other types, {written.unreadable:,} unusable records"))
    return EXIT_OK


def _choose_evaluation(target: str | None, config: Path | None, default_run: str) -> tuple[Path, Path | None]:
    """The config and the checkpoint to evaluate; no checkpoint means the model that the config names.

    ``target`` may be a run's folder (its newest checkpoint), a checkpoint, a model folder (with ``config``), or a
    config file. Without a target it is ``default_run``, unless there is a ``config``.

    Raises:
        ConfigError: the target does not exist, or no config belongs to it.
        CheckpointError: the run has no complete checkpoint, or the given one is not complete.
    """
    if target is None and config is not None:
        return config, None
    path = Path(default_run if target is None else target)
    if not path.exists():
        hint = "Run bash scripts/train_video.sh first, or name another." if target is None else _EVAL_TARGETS
        raise ConfigError(f"{path} does not exist. It must be a checkpoint or a run's folder. {hint}")
    if path.is_file():
        if config is not None or path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"{path} is a file. Weights are given as a folder, a config as --config CONFIG. {_EVAL_TARGETS}"
            )
        return path, None
    from vlm_pg.eval.record import run_above
    from vlm_pg.training.checkpoints import problem_with

    if (path / "config.yaml").is_file():
        return config or path / "config.yaml", _newest_checkpoint(path)
    run = run_above(path)
    if config is None and run is None:
        raise ConfigError(
            f"{path} lies in no run's folder, so there is no config.yaml to take data and prompts from. {_EVAL_TARGETS}"
        )
    if path.resolve().parent.name == CHECKPOINTS and (problem := problem_with(path)) is not None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {problem}. Only checkpoints that were saved to their end are used. "
            "Give the run's folder to take its newest complete one."
        )
    return config or Path(str(run)) / "config.yaml", path


def _newest_checkpoint(run_dir: Path) -> Path:
    from vlm_pg.training.checkpoints import candidates, find_checkpoints, problem_with

    found = find_checkpoints(run_dir / CHECKPOINTS)
    for step, path in candidates(run_dir / CHECKPOINTS):
        if not found or step > found[-1][0]:
            print(visible(f"warning: {path} is passed over: {problem_with(path)}"), file=sys.stderr)
    if not found:
        raise CheckpointError(
            f"{run_dir} holds no complete checkpoint. A run saves one at its end, and every training.checkpoint_every "
            f"steps. Finish it with run.resume=auto, or evaluate the model it starts from: "
            f"vlm-pg eval --config {run_dir / 'config.yaml'}."
        )
    return found[-1][1]


def _config_of_prepared(config: RunConfig, out: Path) -> RunConfig:
    """The configuration with all prepared records in ``out`` as its data.

    Raises:
        ConfigError: the folder was not prepared from a published data set.
    """
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{out}' has no {REPORT}, so that it is not known what was prepared. --check goes with published sets "
            "and generic. Use vlm-pg check with this configuration and these records."
        ) from error
    lines = {name: out / f"{name}.jsonl" for name in ("train", "eval") if report[name]}
    sets = {name: path if path.is_file() else Path(f"{out}:{name}") for name, path in lines.items()}
    data = config.data.model_copy(
        update={
            "train": sets.get("train"),
            "eval": {"eval": sets["eval"]} if "eval" in sets else {},
            "media_root": Path(report["media_root"]) if "media_root" in report else None,
            "limit": None,
            "mixture": {},
        }
    )
    evaluation = config.eval.model_copy(update={"sets": None, "limit": None})
    return config.model_copy(update={"data": data, "eval": evaluation})


def run_pipeline(name: str | None, argv: Sequence[str]) -> int:
    """Run the data pipeline ``name`` with its own arguments, or list all without a name; returns the exit code.

    Raises:
        ConfigError: there is no such pipeline.
    """
    pipelines = find_pipelines()
    if name is None:
        width = max(map(len, pipelines), default=0)
        print("Data sets (vlm-pg prepare NAME --help tells how one is published, an example record and the arguments):")
        for known, description in pipelines.items():
            print(f"  {known:{width}}  {description.partition(chr(10))[0]}")
            for paragraph in description.split("\n\n"):
                if paragraph.startswith("Licence:"):
                    print(f"  {'':{width}}  {' '.join(paragraph.split())}")
        return EXIT_OK
    module_name = name.replace("-", "_")
    if module_name not in pipelines:
        raise ConfigError(
            f"There is no data set {name!r}. Known are {', '.join(pipelines) or 'none'}. "
            "Run vlm-pg prepare to see them with a line each."
        )
    module = importlib.import_module(f"{PIPELINES}.{module_name}")
    return int(module.main(list(argv)) or EXIT_OK)


def find_pipelines() -> dict[str, str]:
    """Name -> docstring, of every module of ``data_pipelines`` that has a ``main``.

    The files are parsed, not imported: listing must stay fast.
    """
    spec = importlib.util.find_spec(PIPELINES)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(
            f"The package {PIPELINES} is not installed. It comes with this repository. "
            "Install from a checkout: bash scripts/train_video.sh does, or pip install -e ."
        )
    pipelines = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # Defined as a function or by assignment.
        names = [getattr(target, "id", "") for node in tree.body for target in getattr(node, "targets", ())]
        if "main" in [*names, *(getattr(node, "name", "") for node in tree.body)]:
            pipelines[path.stem] = ast.get_docstring(tree) or ""
    return pipelines
