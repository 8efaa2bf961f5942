"""``python -m scripts.bench.gpu_check``: see ``scripts/gpu_check.sh``."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.bench.gpu_check.machine import describe, install_wheels, is_there, torch_sees_gpu
from scripts.bench.gpu_check.run import PAGE, RESERVE_SECONDS, RESULT, Result, Run
from scripts.bench.gpu_check.stages import ENVIRONMENT, MODELS, PLANS, Stage, as_begun, check
from vlm_pg.errors import VlmPgError

EXIT_OK, EXIT_NOT_ALL, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
_EPILOG = """\
exit codes: 0 all stages that ran are ok; 1 a stage failed or its time was up; 2 you can put it right; 130 stopped

examples:
  bash scripts/gpu_check.sh --out gpu-check                         on a machine with a GPU, at most 10 minutes
  bash scripts/gpu_check.sh --device cpu --model small              what of it needs no GPU
  bash scripts/gpu_check.sh --wheels wheels --out gpu-check         packages carried along, nothing installed
  bash scripts/gpu_check.sh --plan training --minutes 9.5 --out training      then the same with --resume, as told
"""


def main(argv: Sequence[str]) -> int:
    """Run the check; its exit code."""
    options = _parser().parse_args(argv)
    try:
        return _check(options, shlex.join(["bash", "scripts/gpu_check.sh", *argv]))
    except VlmPgError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("gpu_check: stopped; what was found before is in the folder", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Does all of it work on this machine's GPU, how fast, and what was counted beforehand? Writes "
        f"{RESULT}, {PAGE} and a log of each stage. A stage that fails or hangs stops no other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    today = datetime.now().strftime("%Y-%m-%d")
    parser.add_argument(
        "--out", type=Path, default=Path(f"runs/gpu-check-{today}"), metavar="FOLDER", help="%(default)s"
    )
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="for all stages together (default: 10)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, help="whose dimensions are measured (default: 7b 8b; small on a CPU)"
    )
    plans = "; ".join(f"{name}: {words}" for name, (words, _) in PLANS.items())
    parser.add_argument("--plan", choices=list(PLANS), help=f"in place of the check, a list of measurements. {plans}")
    parser.add_argument("--resume", action="store_true", help="go on with --out: run only stages that are not ok there")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="of the stages only these, which --list names")
    parser.add_argument("--list", action="store_true", help="print the stages and their commands, and run nothing")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="*.whl to install into a new folder, as they are")
    parser.add_argument("--site", type=Path, nargs="+", default=[], metavar="FOLDER", help="more folders of packages")
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not RESERVE_SECONDS / 30 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{value:g} is no time for this; give 0.3 to 1440 minutes")
    return value


def _check(options: argparse.Namespace, command: str) -> int:
    started = datetime.now(UTC)
    folder = options.out.resolve()
    if options.list:
        for stage in _stages(options, folder, "cpu" if options.device == "cpu" else "cuda"):
            print(f"{stage.name}: {stage.title}{', needs a GPU' if stage.needs_gpu else ''}")
            for words in stage.commands:
                print(f"  {shlex.join(as_begun(words))}")
        return EXIT_OK
    python_path = _python_path(options)
    machine = describe(python_path)
    device = options.device
    if device == "auto":
        device = "cuda" if machine["gpus"] or torch_sees_gpu(python_path) else "cpu"
    stages = _stages(options, folder, device)
    head = {"when": started.isoformat(timespec="seconds"), "commands": [command], "device": device, "machine": machine}
    result = Result.open(folder, head, options.resume)
    result.save()
    signal.signal(signal.SIGTERM, _as_interrupt)
    run = Run(result, device, 60 * options.minutes - (datetime.now(UTC) - started).total_seconds(), python_path)
    try:
        run.go(stages)
    finally:
        _write_page(result)
    bad = [outcome.name for outcome in result.outcomes if outcome.status in ("failed", "time was up")]
    if left_out := [outcome.name for outcome in result.outcomes if outcome.status == "left out"]:
        print(f"left out: {', '.join(left_out)}")
    print(f"not ok: {', '.join(bad)}" if bad else "all stages that ran are ok")
    return EXIT_NOT_ALL if bad else EXIT_OK


def _python_path(options: argparse.Namespace) -> list[str]:
    """Folders of packages that were carried along; this process takes them, too."""
    folders = [str(folder.resolve()) for folder in options.site]
    if options.wheels is not None:
        folders.insert(0, str(install_wheels(options.wheels)))
    sys.path[:0] = folders
    return folders


def _stages(options: argparse.Namespace, folder: Path, device: str) -> list[Stage]:
    """Raises VlmPgError for a name in --only that no stage has."""
    if options.plan:
        stages = PLANS[options.plan][1](folder, device, (options.model or ["7b"])[0])
    else:
        models = tuple(options.model or (("small",) if device == "cpu" else ("7b", "8b")))
        stages = check(folder, device, models)
    names = [stage.name for stage in stages]
    if unknown := sorted(set(options.only or ()) - set(names)):
        raise VlmPgError(f"--only got {', '.join(unknown)}; the stages are {', '.join(names)}. Name some of these.")
    return [stage for stage in stages if not options.only or stage.name in (*options.only, ENVIRONMENT)]


def _write_page(result: Result) -> None:
    print(f"numbers: {result.folder / RESULT}")
    if not is_there("jinja2"):
        print("no page: jinja2 is not installed")
        return
    from scripts.bench.gpu_check.page import write_page

    write_page(result)
    print(f"page: {result.folder / PAGE}")


def _as_interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
