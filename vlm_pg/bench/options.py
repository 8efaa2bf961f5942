"""The command line of ``vlm-pg bench step``."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_pg.bench.grid import GENERATIONS, RATIOS
from vlm_pg.bench.names import DEFAULT, DESCRIPTIONS, WORK
from vlm_pg.bench.shapes import SIZES

_WHAT = """\
Time and peak memory of one group's forward and backward: a prefix of P tokens and G responses of R tokens. Every
contestant computes the same loss from the same random weights (text tokens stand in for visual ones: past the vision
tower the language model treats them alike). Loss and gradient norm of all contestants are compared before anything is
timed; a difference above 1e-4 (bf16: 3e-2) is an error.
"""

_HOW = """\
how it is measured:
  time     One process per point. Each contestant runs once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times; medians are compared.
  memory   On a CPU, each contestant runs once in a forked process of its own that builds the model and warms up on a
           tiny group: peak resident memory (VmHWM, reset through /proc/self/clear_refs; where that is not allowed,
           ru_maxrss) above what was resident before. glibc is told to give freed memory back at once. On a GPU:
           torch.cuda.max_memory_allocated above memory_allocated before, during the warm-up. Both include the
           gradients of the weights and leave out the weights.
  bounds   tokens: through the linear layers; attention: pairs of query and key; FLOPs: both and the output head,
           weighed with the model's shape. The bound of memory is what the activations kept by each side would need
           (an estimate). Every gain is printed with its bound and the share of it that was reached. The bounds count
           what repetition costs and no more: ours also leaves out queries, output projection and MLP of prompt rows in
           the last layer and, with --checkpointing, the second computation of attention. Both weigh most in models of
           few layers, where shares pass 100%.

examples:
  vlm-pg bench step --points 2048,8,256 --model mid --threads 2
  vlm-pg bench step --budget-minutes 30 --model small --checkpointing --out step.json --figure step.svg
  vlm-pg bench step --prefix 4096 8192 --generations 8 --ratios 8 32 --model 7b --dtype bf16 --checkpointing
"""


# Without a word about what is wanted, this long.
DEFAULT_MINUTES = 10


def step_parser() -> argparse.ArgumentParser:
    """Options of ``vlm-pg bench step``."""
    kinds = "\n".join(f"  {name}: {text}" for name, text in DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="vlm-pg bench step",
        description=_WHAT,
        epilog=f"contestants:\n{kinds}\n\n{_HOW}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("points (default: the whole grid, informative points first)")
    what.add_argument("--points", nargs="+", metavar="P,G,R", help="exactly these: prefix, responses, response tokens")
    what.add_argument("--prefix", type=int, nargs="+", metavar="P", help="prefix lengths, tokens")
    lengths = what.add_mutually_exclusive_group()
    lengths.add_argument(
        "--ratios", type=float, nargs="+", default=RATIOS, metavar="P/R", help="prefix tokens per response token"
    )
    lengths.add_argument("--response", type=int, nargs="+", metavar="R", help="response lengths, tokens")
    what.add_argument(
        "--generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="responses per prompt"
    )
    what.add_argument("--ragged", action="store_true", help="response lengths drawn from R/4 to R, the same every time")
    how = add_measurement_options(parser, list(WORK), list(DEFAULT))
    how.add_argument("--checkpointing", action="store_true", help="recompute activations in backward, all contestants")
    add_budget_and_output_options(parser, "--points or --prefix")
    return parser


def add_measurement_options(
    parser: argparse.ArgumentParser, contestants: list[str], default: list[str]
) -> argparse._ArgumentGroup:
    """Who is measured on what; returns the group, for options of one measurement alone."""
    how = parser.add_argument_group("measurement")
    how.add_argument("--contestants", nargs="+", choices=contestants, default=default, metavar="NAME", help="see below")
    how.add_argument("--model", choices=sorted(SIZES), default="small", help="shape of the random model")
    how.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and activations")
    how.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    how.add_argument("--repeats", type=int, default=3, help="timed runs of each contestant, after one warm-up")
    how.add_argument("--threads", type=int, default=None, help="CPU threads; default: all cores this process may use")
    how.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory runs of a CPU")
    return how


def add_budget_and_output_options(parser: argparse.ArgumentParser, wishes: str) -> None:
    """How long it may take and where the numbers go; ``wishes``: the options that say what is wanted."""
    budget = parser.add_argument_group("budget; what is left out is listed with its reason")
    budget.add_argument(
        "--budget-minutes",
        type=float,
        help="start nothing that is expected to end later; one point gets half at most "
        f"(default: {DEFAULT_MINUTES}; none where {wishes} say what is wanted)",
    )
    budget.add_argument(
        "--memory-gib", type=float, help="leave out who is expected to need more (CPU default: 80%% of what is free)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, help="file for the raw numbers, JSON, written after every point")
    out.add_argument(
        "--resume", action="store_true", help="go on with the file --out: measure only the points it lacks"
    )
    out.add_argument("--figure", type=Path, help="draw the results into this SVG file")
