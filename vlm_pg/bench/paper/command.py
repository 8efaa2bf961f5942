"""``vlm-pg bench paper``: what every contestant of ``bench step`` and ``bench rollout`` asks of a GPU, counted."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.bench.grid import RolloutPoint, StepPoint, parse_points
from vlm_pg.bench.paper.cuda_kernels import MULTIPROCESSORS
from vlm_pg.bench.paper.models import known_models
from vlm_pg.bench.paper.plan import (
    COUNTED_ROLLOUTS,
    GRPO_POINTS,
    ROLLOUT_POINTS,
    STEP_POINTS,
    USUAL_WORKS,
    WORKS,
    specifications,
)
from vlm_pg.bench.paper.roofline import LAUNCH_SECONDS
from vlm_pg.bench.paper.whole_step import PAIR_TOKENS, WORDS, WholeStepPoint
from vlm_pg.bench.step import CONTESTANTS, OURS
from vlm_pg.errors import ConfigError
from vlm_pg.threads import usable_cores

# Processor seconds of one count on a core of 2026: of a whole model, of one from few layers.
_WHOLE_SECONDS, _FEW_SECONDS = 10.0, 4.0

_WHAT = """\
Counts, without a GPU, what each contestant of `vlm-pg bench step` and `vlm-pg bench rollout` would ask of one: FLOPs,
bytes read and written by kind of operation, kernel launches, waits of the host, peak memory; and from them the least
time on A100, H100, H200 and RTX 4090 (a roofline), which roof binds, the time to expect, and whether it fits. Every
figure is counted, none is measured. The contestants' own code runs on torch's fake tensors, with the CUDA kernel of
grouped attention; nothing is computed, and no weights are needed.
"""

_HOW = f"""\
how it is counted:
  step      One forward and backward, as `vlm-pg bench step` runs it. Packing is part of it: waits in it are for tensors
            that are the host's own. With --few-layers (and always for linear attention, whose reference in torch runs
            chunk by chunk) two shallower models are counted; FLOPs, bytes, launches and waits of the whole follow
            exactly, its peak memory is then a least.
  rollout   Ours: RolloutEngine's own loop with the decoder that runs on CUDA. Prompts once; of each stretch of decode
            steps with equal shapes the first, second and last step, between which counts grow evenly. Long prompts are
            read in pieces, as on the {MULTIPROCESSORS} multiprocessors of an H100. What a CUDA graph replays is one
            launch for the host. transformers-generate: four tokens of it, which must grow evenly; the
            others follow. Both from two shallower models. transformers-continuous cannot be counted.
  tower     The vision tower, frozen, over a video of 1,024 visual tokens: once for a group, and once for each of 8
            rollouts; with torch's flash attention over all frames or windows in one call a layer.
  grpo-step A whole step of ours on one question (not among the usual works): the tower, frozen, over F frames of
            {PAIR_TOKENS} visual tokens a pair, the rollouts behind it, the update; with --reference its forward.
            Behind the tower visual tokens count as text. The update's own forward gives the old log-probabilities.
            Without optimizer, decoding of videos and rewards. Peak memory is that of the phase that needs most, visual
            features and without --lora the reference's own weights beside it.
  ranks     With --sequence-ranks N, one of N processes that divide an update's stream (training.sequence_parallel), the
            one with the most rows, gets tensors of the others' shapes without values. Bytes to the others by kind of
            collective, over NVLink or PCIe one way, are another roof; nothing else runs meanwhile. Gradients summed
            over ranks once an update, and how weights may be scattered, are not in it.
  memory    Above the weights, gradients included; no optimizer states (`vlm-pg plan` has those).
  time      A lower bound: of each kind of operation max(FLOPs / peak, bytes / bandwidth), summed; or launches times
            --launch-us if that is more. Behind "~" what to expect: the same with the shares of the peaks that an H100
            reached, and a time for each kernel, wait and launch (bench/paper/devices.py says which).
  prefix-grouper-*  attends by torch's flash operator, as on a GPU; in fp32 with a mask, whose pairs count too.

examples:
  vlm-pg bench paper --checkpointing --models Qwen2.5-VL-7B --out paper.json --markdown paper.md --figure paper.svg
  vlm-pg bench paper --few-layers --works step --points 4096,8,512 --models ./my-checkpoint --lora 64
  vlm-pg bench paper --works rollout --rollout-points 16384,8,512 --contestants ours
  vlm-pg bench paper --sequence-ranks 1 2 4 --points 131072,8,512 --checkpointing --figure ranks.svg
  vlm-pg bench paper --works grpo-step --grpo-points 256,8,512 --models 7b --checkpointing --lora 16
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="vlm-pg bench paper",
        description=_WHAT,
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", nargs="*", metavar="MODEL", help="as --models, in front of everything else")
    made.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        default=[],
        help=f"of {', '.join(known_models())}; or folders with config.json; default: Qwen2.5-VL-7B",
    )
    made.add_argument(
        "--works",
        nargs="+",
        choices=WORKS,
        metavar="WORK",
        help=f"of {', '.join(WORKS)}; default: all but the last",
    )
    made.add_argument("--points", nargs="+", metavar="P,G,R", help="of step: prefix, responses, response tokens")
    made.add_argument(
        "--rollout-points", nargs="+", metavar="P,G,N[,B]", help="of rollout: prefix, responses, new tokens, groups (1)"
    )
    made.add_argument(
        "--grpo-points",
        nargs="+",
        metavar="F,G,N",
        help=f"of grpo-step: frames, rollouts, new tokens; a prompt of {PAIR_TOKENS // 2} F + {WORDS} tokens",
    )
    made.add_argument("--reference", action="store_true", help="a grpo-step with a reference's forward")
    names = [*CONTESTANTS, *COUNTED_ROLLOUTS]
    made.add_argument("--contestants", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    made.add_argument(
        "--sequence-ranks",
        nargs="+",
        type=int,
        metavar="N",
        help=f"of step's {OURS}, and of nothing else: one of N ranks that divide the stream; 1: the whole",
    )
    made.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="of weights and activations")
    made.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    made.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank alone")
    made.add_argument("--liger", action="store_true", help="with model.liger on, all contestants")
    made.add_argument("--few-layers", action="store_true", help="quicker: see step below")
    made.add_argument(
        "--launch-us", type=float, default=LAUNCH_SECONDS * 1e6, help="host's time of one launch (default: %(default)g)"
    )
    made.add_argument("--jobs", type=int, default=None, help="processes at a time; default: all cores it may use")
    made.add_argument("--out", type=Path, help="file for all counts, JSON")
    made.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    made.add_argument("--markdown", type=Path, help="file for the table")
    made.add_argument("--figure", type=Path, help="draw the roofline of an H100 into this SVG file")
    return made


def run(argv: Sequence[str]) -> int:
    """Count, write and print.

    Raises:
        ConfigError: options that cannot be, files that exist, no such model.
        ModelError: a model of no registered family.
    """
    from vlm_pg.bench.paper.record import check_new, entry_of, new_record, write_record

    arguments = checked(parser().parse_args(argv))
    check_new([arguments.out, arguments.markdown, arguments.figure])
    specs = list(specifications(arguments))
    if not specs:
        raise ConfigError("None of --contestants has a part in --works. Name others, or leave one of the two out.")
    settings = {key: getattr(arguments, key) for key in ("dtype", "checkpointing", "lora", "liger")}
    settings |= {"launch_seconds": arguments.launch_us / 1e6}
    links = any("sequence_ranks" in spec for spec in specs)
    record = new_record(settings, shlex.join(["vlm-pg", "bench", "paper", *argv]), links)

    def keep(found: list[dict[str, Any]]) -> None:
        """What is known so far, in the order of the table."""
        known = [(spec, result) for spec, result in zip(specs, found, strict=True) if result]
        record["entries"] = [entry_of(spec, result, settings["launch_seconds"]) for spec, result in known]
        if arguments.out:
            write_record(record, arguments.out)

    _count(specs, arguments, keep)
    _show(record, arguments)
    return 0


def checked(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with points made of words.

    Raises:
        ConfigError: options that cannot be.
    """
    arguments.models = [*arguments.model, *arguments.models] or ["Qwen2.5-VL-7B"]
    if arguments.sequence_ranks:
        _check_ranks(arguments)
    arguments.works = arguments.works or list(USUAL_WORKS)
    form = "PREFIX,GENERATIONS,RESPONSE in whole numbers, such as 4096,8,512"
    arguments.points = parse_points(arguments.points, StepPoint, (3,), form) if arguments.points else list(STEP_POINTS)
    form = "PREFIX,GENERATIONS,NEW_TOKENS[,GROUPS] in whole numbers, such as 4096,8,512"
    arguments.rollout_points = (
        parse_points(arguments.rollout_points, RolloutPoint, (3, 4), form)
        if arguments.rollout_points
        else list(ROLLOUT_POINTS)
    )
    form = "FRAMES,GENERATIONS,NEW_TOKENS in whole numbers, such as 256,8,512"
    arguments.grpo_points = (
        parse_points(arguments.grpo_points, WholeStepPoint, (3,), form) if arguments.grpo_points else list(GRPO_POINTS)
    )
    if arguments.lora is not None and arguments.lora < 1:
        raise ConfigError(f"--lora is {arguments.lora}; the rank of an adapter is at least 1. Leave it out for none.")
    if arguments.launch_us < 0:
        raise ConfigError(f"--launch-us is {arguments.launch_us:g}; a launch takes 0 microseconds or more.")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs is {arguments.jobs}; at least 1 process has to count.")
    if arguments.figure:
        from vlm_pg.bench.drawing import require_matplotlib

        require_matplotlib()
    arguments.jobs = arguments.jobs or usable_cores()
    return arguments


def _check_ranks(arguments: argparse.Namespace) -> None:
    """Leave what sequence ranks divide; raises ConfigError where something else is asked for, too."""
    if (few := min(arguments.sequence_ranks)) < 1:
        raise ConfigError(f"--sequence-ranks got {few}; a stream lies on at least 1 rank.")
    whole = [name for name in arguments.contestants or [] if name != OURS]
    whole += [name for name in arguments.works or [] if name != "step"]
    if whole:
        raise ConfigError(
            f"--sequence-ranks divides the stream of step's contestant {OURS} alone, and {', '.join(whole)} would not "
            f"be divided. Give --works step --contestants {OURS}, or count the others without --sequence-ranks."
        )
    arguments.sequence_ranks = list(dict.fromkeys(arguments.sequence_ranks))
    arguments.works, arguments.contestants = ["step"], [OURS]


def _count(
    specs: list[dict[str, Any]], arguments: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Hand on what was found of each, in order and after each of them; says what it is at."""
    todo = [place for place, spec in enumerate(specs) if "not_counted" not in spec]
    expected = sum(_FEW_SECONDS if specs[place]["layers"] else _WHOLE_SECONDS for place in todo)
    # To where the table does not go.
    say = sys.stderr if arguments.json else sys.stdout
    minutes = expected / arguments.jobs / 60
    print(
        f"{len(todo)} counts, {arguments.jobs} at a time: about {minutes:.1f} min on free cores", file=say, flush=True
    )
    found = [{"not_counted": spec["not_counted"]} if "not_counted" in spec else {} for spec in specs]
    keep(found)
    if not todo:
        return
    # Imported once, here: the processes that count are forked with it.
    from vlm_pg.bench.paper.children import ChildEnded, in_children
    from vlm_pg.bench.paper.contestants import tried
    from vlm_pg.bench.paper.table import row_name

    started = time.monotonic()
    results = in_children(lambda place: tried(specs[place]), todo, arguments.jobs)
    for done, (place, result) in enumerate(results, 1):
        if isinstance(result, ChildEnded):
            result = {"not_counted": str(result)}
        found[place] = result
        keep(found)
        spec, why = specs[place], result.get("not_counted")
        what = f"{spec['model']}, {spec['work']} {spec['said']}: {row_name(spec)}"
        seconds = time.monotonic() - started
        print(
            f"[{done}/{len(todo)}, {seconds:.0f} s] {what}{f': not counted, {why}' if why else ''}",
            file=say,
            flush=True,
        )


def _show(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    from vlm_pg.bench.paper.table import markdown

    if arguments.json:
        import json

        print(json.dumps(record, indent=1))
    table = markdown(record)
    if not arguments.json:
        print(table)
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(table)
    if arguments.figure:
        from vlm_pg.bench.paper.chart import write_chart

        write_chart(record, arguments.figure)
