"""``vlm-pg bench rollout``: generating G responses per prompt."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from vlm_pg.bench.runner import Contestant, PointsRun, gib_words, memory_words
from vlm_pg.bench.work import (
    GenerationWork,
    RolloutPoint,
    generation_flops,
    kv_bytes,
    one_by_one_generation,
    parse_points,
    repeated_generation,
    shared_generation,
)
from vlm_pg.memory import GIB

OURS, ONE_BY_ONE = "ours", "ours-one-by-one"
_CASE = "vlm_pg.bench.rollout_case"
CONTESTANTS = {
    OURS: Contestant(
        "RolloutEngine.generate: each prompt encoded once, its keys and values kept once for its G responses, all "
        "groups decoded in one batch",
        shared_generation,
        f"{_CASE}:ours",
    ),
    "transformers-generate": Contestant(
        "transformers' generate with the prompts repeated G times, which is what "
        "num_return_sequences=G does before its prefill (it refuses G > 1 with greedy decoding); dynamic cache; sdpa, "
        "on a GPU flash_attention_2 where installed",
        repeated_generation,
        f"{_CASE}:transformers_generate",
    ),
    ONE_BY_ONE: Contestant(
        "ours, one group after the other (only where there are several groups)",
        one_by_one_generation,
        f"{_CASE}:ours_one_by_one",
    ),
}


class RolloutRun(PointsRun[RolloutPoint]):
    """One run over points of generation."""

    measurement = "rollout"
    command = ("vlm-pg", "bench", "rollout")
    contestants_known = CONTESTANTS
    gain_key = "ours_gain"
    case = f"{_CASE}:GenerationCase"
    default_points = ("1024,8,64", "4096,8,64")
    point_form = "P,G,N[,B]: prefix, responses, new tokens, groups (1)"
    description = """\
Speed and peak memory of generating: B prompts of P tokens, G responses of N tokens to each. Every contestant decodes
greedily from the same random weights and the same random prompts (text tokens stand in for visual ones: past the vision
tower the language model treats them alike), and generates exactly N tokens a response. In fp32 the tokens of all
contestants are compared before anything is timed; a difference is an error that names the first position, unless a
plain forward finds the two tokens' logits tied there (up to 1e-4 apart). In bf16, where every contestant rounds
differently, the share of equal tokens is printed.
"""
    epilog = """\
how it is measured:
  decoding Greedy for everybody: only then can tokens be compared. Sampling would add the same work per token to all.
  time     One process per point. Each contestant generates once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times, each with one new token and with all N; medians are compared.
             tokens/s              new tokens of all responses over the time of the whole run, prefill included
             time to first token   the time of a run of one token (of all groups)
             decode time per token the rest of the whole run over N - 1: one more token for all responses
  memory   As `vlm-pg bench step` measures it. It includes keys and values, whose own size is printed beside it.
  expected The ratio expected from counts. FLOPs: of prefill and decoding, weighed with the model's shape; prompt
           tokens: encoded before the first token (G x P per group where the prompt is repeated, P where it is shared);
           keys and values: (P + N - 1) x G per group against P + (N - 1) x G (the last token is never read). Decoding
           for few responses is limited by memory bandwidth more than by FLOPs, so tokens/s can be far above or below
           the expected ratio.

examples:
  vlm-pg bench rollout --points 4096,8,64 4096,8,64,4 --model mid --threads 2
  vlm-pg bench rollout --points 8192,8,256 --model 7b --dtype bf16 --out rollout.json
"""

    @classmethod
    def points(cls, arguments: argparse.Namespace) -> list[RolloutPoint]:
        form = (
            "PREFIX,GENERATIONS,NEW_TOKENS or PREFIX,GENERATIONS,NEW_TOKENS,GROUPS in whole numbers, such as "
            "4096,8,64 or 4096,8,64,4"
        )
        return parse_points(arguments.points, RolloutPoint, (3, 4), form)

    def contestants_at(self, point: RolloutPoint) -> list[str]:
        return [name for name in self.contestants if name != ONE_BY_ONE or point.groups > 1]

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
        # Where decoding takes nearly no time, the difference of two medians can be zero or negative.
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
        return gain

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = (
            f"  {name:24}{entry['tokens_per_second']:9.1f} tok/s, first after {entry['first_token_seconds']:.3f} s, "
            f"then {1e3 * entry['decode_seconds_per_token']:.1f} ms a token {gib_words(entry.get('peak_bytes'), 3)} "
            f"(keys and values {entry['kv_bytes'] / GIB:.3f})"
        )
        if entry["equal_tokens"] < 1:
            line += f", {entry['equal_tokens']:.1%} of its tokens equal"
        if (gain := entry.get(self.gain_key)) is None:
            return [line]
        bound = gain["bounds"]
        words = (
            f"ours, times as fast: {gain['throughput']:.2f}x tokens/s (expected {bound['flops']:.2f}x by FLOPs), "
            f"{gain['first_token']:.2f}x to the first token (expected {bound['prefill_tokens']:.2f}x by prompt tokens)"
        )
        words += f", {gain['decode']:.2f}x decoding" if "decode" in gain else ""
        if "memory" in gain:
            words += (
                f"; {memory_words(gain['memory'])} memory (keys and values alone: {memory_words(bound['kv_bytes'])})"
            )
        return [line, f"    {words}"]

    def _work(self, name: str, point: RolloutPoint) -> GenerationWork:
        work: GenerationWork = self.contestants_known[name].work(point)
        return work


main = RolloutRun.main
