"""``vlm-pg bench step``: one group's forward and backward."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from vlm_pg.bench.runner import Contestant, PointsRun, gib_words, memory_words
from vlm_pg.bench.work import (
    CHUNK_TOKENS,
    StepPoint,
    Work,
    bounds,
    padded_work,
    parse_points,
    repeated_work,
    shared_work,
)

OURS = "grouped"
_CASE = "vlm_pg.bench.step_case"
CONTESTANTS = {
    OURS: Contestant(
        "ours: the pass that training makes of a group that fits: prefix once, grouped attention, logits of response "
        "tokens in chunks",
        shared_work,
        f"{_CASE}:grouped",
    ),
    "transformers-batch": Contestant(
        "transformers' forward over the prefix repeated per response, right-padded where ragged, no "
        "mask, logits of response rows only, all at once; sdpa, on a GPU flash_attention_2 where installed",
        padded_work,
        f"{_CASE}:transformers_batch",
    ),
    "transformers-sequential": Contestant(
        "transformers-batch, but one sequence after the other, gradients accumulated",
        repeated_work,
        f"{_CASE}:transformers_sequential",
    ),
    "grouped-chunked": Contestant(
        f"ours, prefix once, responses in chunks of {CHUNK_TOKENS:,} tokens; memory does not grow",
        shared_work,
        f"{_CASE}:grouped_chunked",
    ),
}


class StepRun(PointsRun[StepPoint]):
    """One run over groups, forward and backward."""

    measurement = "step"
    command = ("vlm-pg", "bench", "step")
    contestants_known = CONTESTANTS
    gain_key = "grouped_gain"
    comparable = (*PointsRun.comparable, "checkpointing", "ragged")
    case = f"{_CASE}:TrainingCase"
    default_points = ("1024,8,128", "4096,8,512")
    point_form = "P,G,R: prefix, responses, response tokens"
    description = """\
Time and peak memory of one group's forward and backward: a prefix of P tokens and G responses of R tokens. Every
contestant computes the same loss from the same random weights (text tokens stand in for visual ones: past the vision
tower the language model treats them alike). Loss and gradient norm of all contestants are compared before anything is
timed; a difference above 1e-4 (bf16: 3e-2) is an error.
"""
    epilog = """\
how it is measured:
  time     One process per point. Each contestant runs once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times; medians are compared.
  memory   On a CPU, each contestant runs once in a forked process of its own that builds the model and warms up on a
           tiny group: peak resident memory (VmHWM, reset through /proc/self/clear_refs; where that is not allowed,
           ru_maxrss) above what was resident before. glibc is configured to return freed memory at once. On a GPU:
           torch.cuda.max_memory_allocated above memory_allocated before, during the warm-up. Both include the
           gradients of the weights and leave out the weights.
  expected The speed-up expected from counts. tokens: through the linear layers; attention: pairs of query and key;
           FLOPs: both and the output head, weighed with the model's shape. The counts assume that every token runs
           through every layer. vlm_pg also leaves out queries, output projection and MLP of prompt rows in the last
           layer and, with --checkpointing, the second computation of attention, so the measured speed-up can exceed
           100% of the expected one, mainly in models of few layers.

examples:
  vlm-pg bench step --points 2048,8,256 --model mid --threads 2
  vlm-pg bench step --points 4096,8,128 4096,8,512 --model 7b --dtype bf16 --checkpointing --out step.json
"""

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        parser = super().parser()
        parser.add_argument(
            "--ragged", action="store_true", help="response lengths drawn from R/4 to R, always the same"
        )
        parser.add_argument(
            "--checkpointing", action="store_true", help="recompute activations in backward, all contestants"
        )
        return parser

    @classmethod
    def points(cls, arguments: argparse.Namespace) -> list[StepPoint]:
        form = "PREFIX,GENERATIONS,RESPONSE in whole numbers, such as 4096,8,512"
        return parse_points(arguments.points, partial(StepPoint, ragged=arguments.ragged), (3,), form)

    def medians(self, name: str, point: StepPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        return {"median_seconds": statistics.median(numbers["seconds"])}

    def gain(self, name: str, point: StepPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        bound = bounds(self.shape, self._work(name, point), self._work(OURS, point), self.arguments.checkpointing)
        faster = theirs["median_seconds"] / ours["median_seconds"]
        gain: dict[str, Any] = {"bounds": bound, "speedup": faster, "speedup_share": faster / bound["flops"]}
        if theirs.get("cpu_seconds") and ours.get("cpu_seconds"):
            gain["cpu_speedup"] = statistics.median(theirs["cpu_seconds"]) / statistics.median(ours["cpu_seconds"])
        if theirs.get("peak_bytes") and ours.get("peak_bytes"):
            gain["memory"] = theirs["peak_bytes"] / ours["peak_bytes"]
        return gain

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = f"  {name:24}{entry['median_seconds']:9.3f} s {gib_words(entry.get('peak_bytes'), 2)}"
        if (gain := entry.get(self.gain_key)) is None:
            return [line]
        bound = gain["bounds"]
        line += (
            f"   grouped {gain['speedup']:.2f}x faster (expected {bound['flops']:.2f}x by FLOPs, "
            f"{bound['tokens']:.2f}x by tokens, {bound['attention']:.2f}x by attention: "
            f"{gain['speedup_share']:.0%} of the FLOP ratio)"
        )
        line += f", {gain['cpu_speedup']:.2f}x in processor seconds" if "cpu_speedup" in gain else ""
        return [line + (f", {memory_words(gain['memory'])} memory" if "memory" in gain else "")]

    def _work(self, name: str, point: StepPoint) -> Work:
        work: Work = self.contestants_known[name].work(point.prefix, point.lengths)
        return work


main = StepRun.main
