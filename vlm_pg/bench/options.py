"""Options that ``vlm-pg bench step``, ``rollout`` and ``eval`` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.drawing import require_matplotlib
from vlm_pg.bench.shapes import SIZES
from vlm_pg.errors import ConfigError
from vlm_pg.threads import usable_cores

# Without a word about what is wanted, this long.
DEFAULT_MINUTES = 10


def measurement_parser(
    name: str, what: str, how: str, contestants: Mapping[str, Contestant], draws: bool = True, counts: bool = False
) -> tuple[argparse.ArgumentParser, argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """A parser, its group for points and that for how they are measured.

    Args:
        what, how: what the help says before and behind the options.
        draws: whether there is a figure of it.
        counts: whether something is counted beside it.
    """
    kinds = "\n".join(f"  {name}: {contestant.description}" for name, contestant in contestants.items())
    parser = argparse.ArgumentParser(
        prog=f"vlm-pg bench {name}",
        description=what,
        epilog=f"contestants:\n{kinds}\n\n{how}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    points = parser.add_argument_group("points (default: the whole grid, informative points first)")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--contestants",
        nargs="+",
        choices=list(contestants),
        default=list(contestants),
        metavar="NAME",
        help="see below",
    )
    group.add_argument("--model", choices=sorted(SIZES), default="small", help="shape of the random model")
    group.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and activations")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    group.add_argument("--repeats", type=int, default=3, help="timed runs of each contestant, after one warm-up")
    group.add_argument("--threads", type=int, default=None, help="CPU threads; default: all cores this process may use")
    group.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory runs of a CPU")
    if counts:
        group.add_argument("--no-counts", dest="counts", action="store_false", help="leave out what is counted")
    else:
        parser.set_defaults(counts=False)
    _add_budget_and_output(parser, draws)
    return parser, points, group


def _add_budget_and_output(parser: argparse.ArgumentParser, draws: bool) -> None:
    budget = parser.add_argument_group("budget; what is left out is listed with its reason")
    budget.add_argument(
        "--budget-minutes",
        type=float,
        help="start nothing that is expected to end later; one point gets half at most "
        f"(default: {DEFAULT_MINUTES}; none where --points or --prefix say what is wanted)",
    )
    budget.add_argument(
        "--memory-gib", type=float, help="leave out who is expected to need more (CPU default: 80%% of what is free)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, help="file for the raw numbers, JSON, written after every point")
    out.add_argument(
        "--resume", action="store_true", help="go on with the file --out: measure only the points it lacks"
    )
    if draws:
        out.add_argument("--figure", type=Path, help="draw the results into this SVG file")
    else:
        parser.set_defaults(figure=None)


def checked_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with what was left open filled in.

    Raises:
        ConfigError: options that contradict each other, a device or package that is not there.
    """
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}; at least 1 timed run is needed.")
    if arguments.budget_minutes is not None and arguments.budget_minutes <= 0:
        raise ConfigError(
            f"--budget-minutes is {arguments.budget_minutes:g}; it must be above 0. Leave it out where --points or "
            "--prefix say what is wanted, to measure all of that."
        )
    if arguments.figure:
        require_matplotlib()
    if arguments.budget_minutes is None and not arguments.points and not arguments.prefix:
        arguments.budget_minutes = DEFAULT_MINUTES
        print(f"the whole grid, for {DEFAULT_MINUTES} minutes (--budget-minutes)")
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume goes on with a file; give it with --out FILE.json.")
    if arguments.device != "cpu":
        import torch

        if arguments.device == "auto":
            arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        elif not torch.cuda.is_available():
            raise ConfigError("--device is cuda, but torch sees no GPU. Use --device cpu, or see `vlm-pg doctor`.")
    if arguments.threads is None:
        arguments.threads = usable_cores()
    return arguments
