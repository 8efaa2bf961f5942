"""``vlm-pg bench rollout``: generating G responses per prompt."""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from typing import Any

from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.counted import counted_gain, counted_lines
from vlm_pg.bench.flops import forward_flops, generation_bytes, generation_flops, kv_bytes, parameter_count
from vlm_pg.bench.grid import RolloutPoint, informative_first, parse_points
from vlm_pg.bench.options import measurement_parser
from vlm_pg.bench.runner import PointsRun, gib_words, memory_words
from vlm_pg.bench.work import (
    CONTINUOUS_TOKENS,
    GenerationWork,
    continuous_generation,
    one_by_one_generation,
    one_by_one_generation_done,
    repeated_generation,
    repeated_generation_done,
    shared_generation,
    shared_generation_done,
)
from vlm_pg.memory import GIB

PREFIXES, GENERATIONS, NEW_TOKENS, GROUPS = (512, 1024, 4096, 8192), (4, 8, 16), (64, 256), (1, 4)
# Reading all weights for one decoded token takes about as long as computing this many rows with them.
READ_ROWS = 16

OURS, ONE_BY_ONE = "ours", "ours-one-by-one"
CONTESTANTS = {
    OURS: Contestant(
        "RolloutEngine.generate: each prompt encoded once, its keys and values kept once for its G responses, all "
        "groups decoded in one batch",
        shared_generation,
        "vlm_pg.bench.generation.ours:together",
        done=shared_generation_done,
    ),
    "transformers-generate": Contestant(
        "transformers' generate with the prompts repeated G times, which is what "
        "num_return_sequences=G does before its prefill (it refuses G > 1 with greedy decoding); dynamic cache; sdpa, "
        "on a GPU flash_attention_2 where installed",
        repeated_generation,
        "vlm_pg.bench.generation.transformers_generate:session",
        done=repeated_generation_done,
    ),
    "transformers-continuous": Contestant(
        "transformers' continuous batching, num_return_sequences=G: each prompt encoded once, "
        "then forked, full blocks of 256 tokens shared; on a GPU a cache that lets all rollouts decode together; on a "
        f"CPU {CONTINUOUS_TOKENS:,} tokens a pass and a cache of the blocks that the rollouts fill and one more for "
        "each: a step may read as many tokens as the cache has room for, every rollout counted at its whole length, so "
        "some rollouts take turns (faster there than all at once: a step's mask grows with the square of their "
        "number); its manager is made anew for every run, so that no prompt is found in its cache, and that is not "
        "timed, nor is, on a GPU, one generation for other prompts in which its graphs are captured",
        continuous_generation,
        "vlm_pg.bench.generation.transformers_continuous:session",
    ),
    ONE_BY_ONE: Contestant(
        "ours, one group after the other (only where there are several groups)",
        one_by_one_generation,
        "vlm_pg.bench.generation.ours:one_by_one",
        done=one_by_one_generation_done,
    ),
}

_WHAT = """\
Speed and peak memory of generating: B prompts of P tokens, G responses of N tokens to each. Every contestant decodes
greedily from the same random weights and the same random prompts (text tokens stand in for visual ones: past the vision
tower the language model treats them alike), and generates exactly N tokens a response. In fp32 the tokens of all
contestants are compared before anything is timed; a difference is an error that names the first position, unless a
plain forward finds the two tokens' logits tied there (up to 1e-4 apart). In bf16, where every contestant rounds
differently, the share of equal tokens is printed.
"""

_HOW = """\
how it is measured:
  decoding Greedy for everybody: only then can tokens be compared. Sampling would add the same work per token to all.
  time     One process per point. Each contestant generates once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times, each with one new token and with all N; medians are compared.
             tokens/s              new tokens of all responses over the time of the whole run, prefill included
             time to first token   the time of a run of one token (of all groups)
             decode time per token the rest of the whole run over N - 1: one more token for all responses
  memory   On a CPU, each contestant generates once in a forked process of its own that builds the model and warms up
           on a tiny point: peak resident memory (VmHWM, reset through /proc/self/clear_refs; where that is not allowed,
           ru_maxrss) above what was resident before. glibc is told to give freed memory back at once. On a GPU:
           torch.cuda.max_memory_allocated above memory_allocated before, during the warm-up. Both leave out the weights
           and include keys and values, whose own size is printed beside them.
  bounds   FLOPs: of prefill and decoding, weighed with the model's shape; prompt tokens: encoded before the first token
           (G x P a group where the prompt is repeated, P where it is shared); keys and values: (P + N - 1) x G a
           group against P + (N - 1) x G (the last token is never read). Decoding one token for few responses waits for
           memory more than for FLOPs, so tokens/s can go beyond their bound or stay far below.
  counted  What each contestant is asked to do, counted on tensors without values by `vlm_pg/bench/paper`: peak memory
           above the weights, FLOPs, bytes read and written if no cache kept anything between two kernels. Of decode
           steps that grow evenly some are counted and the others follow; of continuous batching every one. It is no
           measurement: it stands beside one. On a GPU what is counted is bf16, and not continuous batching. Leave it
           out with --no-counts.

examples:
  vlm-pg bench rollout --points 4096,8,64 4096,8,64,4 --model mid --threads 2
  vlm-pg bench rollout --budget-minutes 30 --model small --out rollout.json --figure rollout.svg
  vlm-pg bench rollout --prefix 4096 --generations 1 2 4 8 16 32 --new-tokens 64 --groups 1 --model mid
  vlm-pg bench rollout --prefix 4096 8192 --model 7b --dtype bf16
"""


class RolloutRun(PointsRun[RolloutPoint]):
    """One run over points of generation."""

    measurement = "rollout"
    contestants_known = CONTESTANTS
    gain_key = "ours_gain"
    comparable = ("model", "dtype", "device", "repeats", "threads")
    case = "vlm_pg.bench.generation.case:GenerationCase"
    counted = "vlm_pg.bench.generation.counted:counted_rollout"

    @staticmethod
    def parser() -> argparse.ArgumentParser:
        parser, points, _ = measurement_parser("rollout", _WHAT, _HOW, CONTESTANTS, counts=True)
        points.add_argument(
            "--points", nargs="+", metavar="P,G,N[,B]", help="exactly these: prefix, responses, new tokens, groups (1)"
        )
        points.add_argument("--prefix", type=int, nargs="+", metavar="P", help="prefix lengths, tokens")
        points.add_argument(
            "--generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="responses per prompt"
        )
        points.add_argument(
            "--new-tokens", type=int, nargs="+", default=NEW_TOKENS, metavar="N", help="tokens per response"
        )
        points.add_argument(
            "--groups", type=int, nargs="+", default=GROUPS, metavar="B", help="prompts generated for at once"
        )
        return parser

    @staticmethod
    def points(arguments: argparse.Namespace) -> list[RolloutPoint]:
        if arguments.points:
            form = (
                "PREFIX,GENERATIONS,NEW_TOKENS or PREFIX,GENERATIONS,NEW_TOKENS,GROUPS in whole numbers, such as "
                "4096,8,64 or 4096,8,64,4"
            )
            return parse_points(arguments.points, RolloutPoint, (3, 4), form)
        axes = (arguments.prefix or PREFIXES, arguments.generations, arguments.new_tokens, arguments.groups)
        return informative_first(RolloutPoint(*values) for values in product(*axes))

    def contestants_at(self, point: RolloutPoint) -> list[str]:
        # One group after the other is the same as together where there is one.
        return [name for name in self.contestants if name != ONE_BY_ONE or point.groups > 1]

    def point_of(self, record: dict[str, Any]) -> RolloutPoint:
        return RolloutPoint(record["prefix"], record["generations"], record["new_tokens"], record["groups"])

    def flops(self, name: str, point: RolloutPoint) -> float:
        """Operations that take as long as one timed run, a whole one and one of a single token.

        Decoding few rows waits for the weights, so every step counts ``READ_ROWS`` rows more than it has.
        """
        work = self._work(name, point)
        reading = work.steps * READ_ROWS * 2 * parameter_count(self.shape)
        return 2 * forward_flops(self.shape, work.prefill) + forward_flops(self.shape, work.decode) + reading

    def peak_bytes(self, name: str, point: RolloutPoint) -> float:
        return generation_bytes(self.shape, self._work(name, point), self.element_bytes)

    def medians(self, name: str, point: RolloutPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        whole, first = statistics.median(numbers["seconds"]), statistics.median(numbers["first_seconds"])
        work = self._work(name, point)
        return {
            "median_seconds": whole,
            "tokens_per_second": point.rollouts * point.new_tokens / whole,
            "first_token_seconds": first,
            "decode_seconds_per_token": (whole - first) / (point.new_tokens - 1),
            "prefill_tokens": work.prefill.tokens,
            "kv_bytes": kv_bytes(self.shape, work, self.element_bytes),
        }

    def gain(self, name: str, point: RolloutPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        gain: dict[str, Any] = {
            "throughput": ours["tokens_per_second"] / theirs["tokens_per_second"],
            "first_token": theirs["first_token_seconds"] / ours["first_token_seconds"],
        }
        # Where decoding takes nearly no time, the difference of two medians can come out as nothing or less.
        if min(theirs["decode_seconds_per_token"], ours["decode_seconds_per_token"]) > 0:
            gain["decode"] = theirs["decode_seconds_per_token"] / ours["decode_seconds_per_token"]
        if theirs.get("peak_bytes") and ours.get("peak_bytes"):
            gain["memory"] = theirs["peak_bytes"] / ours["peak_bytes"]
        flops = [generation_flops(self.shape, self._work(side, point)) for side in (name, OURS)]
        gain["bounds"] = {
            "prefill_tokens": theirs["prefill_tokens"] / ours["prefill_tokens"],
            "flops": flops[0] / flops[1],
            "kv_bytes": theirs["kv_bytes"] / ours["kv_bytes"],
        }
        return gain | counted_gain(theirs, ours)

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = (
            f"  {name:24}{entry['tokens_per_second']:9.1f} tok/s, first after {entry['first_token_seconds']:.3f} s, "
            f"then {1e3 * entry['decode_seconds_per_token']:.1f} ms a token {gib_words(entry.get('peak_bytes'), 3)} "
            f"(keys and values {entry['kv_bytes'] / GIB:.3f})"
        )
        if entry["equal_tokens"] < 1:
            line += f", {entry['equal_tokens']:.1%} of its tokens equal"
        gain = entry.get(self.gain_key)
        lines = [line, f"    {gain_words(gain)}"] if gain else [line]
        return [*lines, *counted_lines(entry, gain, OURS, decimals=3)]

    def _work(self, name: str, point: RolloutPoint) -> GenerationWork:
        return self.contestants_known[name].work(point)


def gain_words(gain: dict[str, Any]) -> str:
    """Ours against one contestant, in times as fast: what was reached beside what counting allows."""
    bound = gain["bounds"]
    words = (
        f"ours, times as fast: {gain['throughput']:.2f}x tokens/s (bound {bound['flops']:.2f}x by FLOPs), "
        f"{gain['first_token']:.2f}x to the first token (bound {bound['prefill_tokens']:.2f}x by prompt tokens)"
    )
    if "decode" in gain:
        words += f", {gain['decode']:.2f}x decoding"
    if "memory" in gain:
        words += f"; {memory_words(gain['memory'])} memory (keys and values alone: {memory_words(bound['kv_bytes'])})"
    return words


main = RolloutRun.main
