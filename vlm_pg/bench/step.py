"""``vlm-pg bench step``: one group's forward and backward."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.counted import counted_gain, counted_lines
from vlm_pg.bench.flops import activation_bytes, bounds, chunk_rows, done_flops, parameter_count
from vlm_pg.bench.grid import GENERATIONS, PREFIXES, RATIOS, StepPoint, informative_first, parse_points
from vlm_pg.bench.options import measurement_parser
from vlm_pg.bench.runner import PointsRun, gib_words, memory_words
from vlm_pg.bench.work import (
    CHUNK_TOKENS,
    Work,
    chunked_done,
    chunked_work,
    grouped_done,
    padded_done,
    padded_work,
    prefix_grouper_done,
    prefix_grouper_readme_done,
    repeated_done,
    sequential_work,
    shared_work,
    whole_logits_work,
)

OURS = "grouped"
CONTESTANTS = {
    OURS: Contestant(
        "ours: the pass that training makes of a group that fits: prefix once, grouped attention, logits of response "
        "tokens in chunks",
        shared_work,
        "vlm_pg.bench.training.grouped:whole",
        done=grouped_done,
    ),
    "transformers-batch": Contestant(
        "transformers' forward over the prefix repeated per response, right-padded where ragged, no "
        "mask, logits of response rows only, all at once; sdpa, on a GPU flash_attention_2 where installed",
        padded_work,
        "vlm_pg.bench.training.transformers_plain:batch",
        done=padded_done,
    ),
    "prefix-grouper-kind": Contestant(
        "prefix_grouper at its best: the responses' last tokens left out, hidden states split "
        "first, logits of response tokens only, in the chunks ours uses; without flash-attn (always on a CPU) the "
        "attention function of both is ours, on torch's sdpa: the package has none there",
        shared_work,
        "vlm_pg.bench.training.prefix_grouper:kind",
        package="prefix_grouper",
        done=prefix_grouper_done,
    ),
    "transformers-sequential": Contestant(
        "transformers-batch, but one sequence after the other, gradients accumulated",
        sequential_work,
        "vlm_pg.bench.training.transformers_plain:sequential",
        done=repeated_done,
    ),
    "prefix-grouper-readme": Contestant(
        "the package prefix_grouper as its README drives it: logits of every token, split afterwards",
        whole_logits_work,
        "vlm_pg.bench.training.prefix_grouper:readme",
        package="prefix_grouper",
        done=prefix_grouper_readme_done,
    ),
    "grouped-chunked": Contestant(
        f"ours, prefix once, responses in chunks of {CHUNK_TOKENS:,} tokens; memory does not grow",
        chunked_work,
        "vlm_pg.bench.training.grouped:chunked",
        done=chunked_done,
    ),
}
# Who holds the logits of a chunk at a time, and who keeps attention's output for the second forward.
CHUNKED_LOGITS = (OURS, "grouped-chunked", "prefix-grouper-kind")
ATTENTION_KEPT = (OURS, "grouped-chunked")

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
           what repeating or sharing the prefix costs, every token through every layer, and no more: ours also leaves
           out queries, output projection and MLP of prompt rows in the last layer and, with --checkpointing, the second
           computation of attention. Both weigh most in models of few layers, where shares pass 100%. How long a point
           takes is judged by what each contestant does compute, which a test holds against a count.
  counted  What each contestant is asked to do, counted on tensors without values by `vlm_pg/bench/paper`: peak memory
           above the weights, FLOPs, bytes read and written if no cache kept anything between two kernels. It takes
           seconds to a minute, and is no measurement: it stands beside one. Leave it out with --no-counts.

examples:
  vlm-pg bench step --points 2048,8,256 --model mid --threads 2
  vlm-pg bench step --budget-minutes 30 --model small --checkpointing --out step.json --figure step.svg
  vlm-pg bench step --prefix 4096 8192 --generations 8 --ratios 8 32 --model 7b --dtype bf16 --checkpointing
"""


class StepRun(PointsRun[StepPoint]):
    """One run over groups, forward and backward."""

    measurement = "step"
    contestants_known = CONTESTANTS
    gain_key = "grouped_gain"
    comparable = ("model", "dtype", "device", "checkpointing", "ragged", "repeats", "threads")
    case = "vlm_pg.bench.training.case:TrainingCase"
    counted = "vlm_pg.bench.training.counted:counted_step"

    @staticmethod
    def parser() -> argparse.ArgumentParser:
        parser, points, measurement = measurement_parser("step", _WHAT, _HOW, CONTESTANTS, counts=True)
        points.add_argument(
            "--points", nargs="+", metavar="P,G,R", help="exactly these: prefix, responses, response tokens"
        )
        points.add_argument("--prefix", type=int, nargs="+", metavar="P", help="prefix lengths, tokens")
        lengths = points.add_mutually_exclusive_group()
        lengths.add_argument(
            "--ratios", type=float, nargs="+", default=RATIOS, metavar="P/R", help="prefix tokens per response token"
        )
        lengths.add_argument("--response", type=int, nargs="+", metavar="R", help="response lengths, tokens")
        points.add_argument(
            "--generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="responses per prompt"
        )
        points.add_argument(
            "--ragged", action="store_true", help="response lengths drawn from R/4 to R, the same every time"
        )
        measurement.add_argument(
            "--checkpointing", action="store_true", help="recompute activations in backward, all contestants"
        )
        return parser

    @staticmethod
    def points(arguments: argparse.Namespace) -> list[StepPoint]:
        make = partial(StepPoint, ragged=arguments.ragged)
        if arguments.points:
            form = "PREFIX,GENERATIONS,RESPONSE in whole numbers, such as 4096,8,512"
            return parse_points(arguments.points, make, (3,), form)
        return informative_first(
            make(prefix, count, response)
            for prefix in arguments.prefix or PREFIXES
            for count in arguments.generations
            for response in arguments.response or [max(2, round(prefix / ratio)) for ratio in arguments.ratios]
        )

    def point_of(self, record: dict[str, Any]) -> StepPoint:
        return StepPoint(record["prefix"], record["generations"], record["response"], self.arguments.ragged)

    def flops(self, name: str, point: StepPoint) -> float:
        """What it does, to the row."""
        done = self.contestants_known[name].done
        assert done is not None
        # A GPU's flash attention takes a suffix behind its prefix without a mask.
        masked = self.arguments.device == "cpu" or self.arguments.dtype == "fp32"
        work = done(point.prefix, point.lengths, chunk_rows(self.shape), masked)
        return done_flops(self.shape, work, self.arguments.checkpointing)

    def peak_bytes(self, name: str, point: StepPoint) -> float:
        """Activations, and the gradients of the weights, which every contestant holds in the end."""
        work = self._work(name, point)
        rows, kept = work.held_logit_rows, name in ATTENTION_KEPT
        if name in CHUNKED_LOGITS:
            rows = min(rows, chunk_rows(self.shape))
        checkpointing, size = self.arguments.checkpointing, self.element_bytes
        activations = activation_bytes(self.shape, work, checkpointing, size, rows, attention_kept=kept)
        return activations + parameter_count(self.shape) * size

    def medians(self, name: str, point: StepPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        return {"median_seconds": statistics.median(numbers["seconds"])}

    def gain(self, name: str, point: StepPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        bound = bounds(self.shape, self._work(name, point), self._work(OURS, point), self.arguments.checkpointing)
        faster = theirs["median_seconds"] / ours["median_seconds"]
        gain: dict[str, Any] = {"bounds": bound, "speedup": faster, "speedup_share": faster / bound["flops"]}
        if theirs.get("cpu_seconds") and ours.get("cpu_seconds"):
            gain["cpu_speedup"] = statistics.median(theirs["cpu_seconds"]) / statistics.median(ours["cpu_seconds"])
        if theirs.get("peak_bytes") and ours.get("peak_bytes"):
            less = theirs["peak_bytes"] / ours["peak_bytes"]
            gain |= {"memory": less, "memory_bound": self.peak_bytes(name, point) / self.peak_bytes(OURS, point)}
            gain["memory_share"] = less / gain["memory_bound"]
        return gain | counted_gain(theirs, ours)

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = f"  {name:24}{entry['median_seconds']:9.3f} s {gib_words(entry.get('peak_bytes'), 2)}"
        gain = entry.get(self.gain_key)
        line = f"{line}   {gain_words(gain)}" if gain else line
        return [line, *counted_lines(entry, gain, OURS)]

    def busy_lines(self, record: dict[str, Any]) -> list[str]:
        by_processor = ", ".join(
            f"{name} {gain['cpu_speedup']:.2f}x (bound {gain['bounds']['flops']:.2f}x, "
            f"{gain['cpu_speedup'] / gain['bounds']['flops']:.0%} of it)"
            for name, entry in record["contestants"].items()
            if "cpu_speedup" in (gain := entry.get(self.gain_key, {}))
        )
        return [f"  in processor seconds, grouped is faster than {by_processor}"] if by_processor else []

    def _work(self, name: str, point: StepPoint) -> Work:
        return self.contestants_known[name].work(point.prefix, point.lengths)


def gain_words(gain: dict[str, Any]) -> str:
    """Achieved, bound and share of the bound, for time and memory."""
    bound = gain["bounds"]
    words = (
        f"grouped {gain['speedup']:.2f}x faster (bound {bound['flops']:.2f}x by FLOPs, "
        f"{bound['tokens']:.2f}x by tokens, {bound['attention']:.2f}x by attention: "
        f"{gain['speedup_share']:.0%} of the FLOP bound)"
    )
    if "memory" in gain:
        words += (
            f", {memory_words(gain['memory'])} memory (bound {memory_words(gain['memory_bound'])} by the memory "
            f"model: {gain['memory_share']:.0%} of it)"
        )
    return words


main = StepRun.main
