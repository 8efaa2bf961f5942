"""Answering questions on videos, from files to answers on disk: ``python -m scripts.bench.eval``."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench import run
from scripts.bench.eval_files import (
    MERGED_PATCHES,
    PATCH_PIXELS,
    TOWERS,
    WINDOW_PATCHES,
    EvalPoint,
    Shown,
    TowerShape,
    head_tokens,
    tail_tokens,
    write_files,
)
from vlm_pg.bench.runner import Contestant, PointsRun, gib_words, memory_words
from vlm_pg.bench.work import (
    GenerationWork,
    RolloutPoint,
    Work,
    decode_work,
    generation_flops,
    parse_points,
    repeated_generation,
)
from vlm_pg.plan.flops import causal_pairs

OURS = "ours"


@dataclass(frozen=True)
class EvalWork:
    """``generation``: of all questions. ``towers``: how often a whole video goes through the vision tower."""

    generation: GenerationWork
    towers: int


def repeated_evaluation(point: EvalPoint) -> EvalWork:
    """For each question its video once through the tower, its whole prompt once per answer."""
    prompt = head_tokens() + Shown.of(point.prefix).visual_tokens + tail_tokens()
    whole = RolloutPoint(prompt, point.generations, point.new_tokens, point.asked)
    return EvalWork(repeated_generation(whole), point.asked)


def shared_evaluation(point: EvalPoint) -> EvalWork:
    """Every video once, behind it each of its questions once, behind that the answers; all decoded together."""
    videos = point.videos
    begun, tail = head_tokens() + Shown.of(point.prefix).visual_tokens, tail_tokens()
    tokens = videos * begun + point.asked * tail
    pairs = videos * causal_pairs(begun) + point.asked * (tail * begun + causal_pairs(tail))
    rollouts = point.asked * point.generations
    decode = decode_work(RolloutPoint(begun + tail, point.generations, point.new_tokens, point.asked))
    kv_tokens = tokens + rollouts * (point.new_tokens - 1)
    return EvalWork(GenerationWork(Work(tokens, pairs, rollouts), decode, kv_tokens), videos)


def tower_flops(tower: TowerShape, patches: int, frame_patches: int, out: int) -> float:
    """Operations of Qwen2.5-VL's vision tower, forward.

    Per patch its embedding and in each layer queries, keys, values, output projection and a gated MLP; a patch meets
    the patches of its whole frame or those of a window (windows that the frame's edge cuts count whole). The merger
    takes four patches through one layer of their joint width and one to ``out``.
    Source of the layers: transformers' ``Qwen2_5_VisionTransformerPretrainedModel``.

    Args:
        patches: of all frames.
        frame_patches: of one temporal patch, which is two frames.
        out: width of the language model.
    """
    linear = tower.layers * 2 * (4 * tower.hidden**2 + 3 * tower.hidden * tower.intermediate)
    whole = len(tower.whole_frame_layers)
    met = whole * frame_patches + (tower.layers - whole) * min(WINDOW_PATCHES, frame_patches)
    joint = MERGED_PATCHES * tower.hidden
    merger = 2 * (joint * joint + joint * out) / MERGED_PATCHES
    return patches * (2 * PATCH_PIXELS * tower.hidden + linear + met * 4 * tower.hidden + merger)


_CASE = "scripts.bench.eval_case"
CONTESTANTS = {
    OURS: Contestant(
        "what vlm-pg eval runs (Evaluator, its prompt source, reader of whole outputs, answer files): a video decoded "
        "and encoded once for all of its questions, each question once for its G answers",
        shared_evaluation,
        f"{_CASE}:ours",
    ),
    "transformers-generate": Contestant(
        "question by question: qwen-vl-utils' process_vision_info (frames of the last video are kept for its next "
        "question), the model's processor, generate(do_sample=True, num_return_sequences=G), batch_decode, our reader, "
        "a line of JSON; the release runs the tower once per question and the prompt once per answer; sdpa, on a GPU "
        "flash_attention_2 where installed",
        repeated_evaluation,
        f"{_CASE}:one_by_one",
        "qwen_vl_utils",
    ),
}


class EvalRun(PointsRun[EvalPoint]):
    """One run over points of evaluation."""

    measurement = "eval"
    command = ("python", "-m", "scripts.bench.eval")
    contestants_known = CONTESTANTS
    gain_key = "ours_gain"
    case = f"{_CASE}:EvalCase"
    default_points = ("4096,8,16", "4096,8,16,4")
    point_form = "P,G,N[,Q[,V]]: visual tokens, answers, new tokens, questions a video (1), videos (1)"
    description = """\
Speed and peak memory of evaluation: Q questions on each of V videos of about P visual tokens, G answers of N tokens to
each, sampled at temperature 1. Clips are rendered and encoded by the measurement (H.264, 640x360, 10 frames a second)
and decoded by everybody in every run, at 2 frames a second, up to 256 visual tokens for two frames. The model is a
Qwen2.5-VL with random weights of the size --model, its vision tower included. Before anything is timed the contestants'
prompts are compared, ids and pixels, and in fp32 their greedy answers; a difference is an error, unless a plain forward
finds the two tokens' logits tied there (up to 1e-4 apart).
"""
    epilog = """\
how it is measured:
  time     One process per point. Each contestant evaluates once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times; medians are compared. A run is from records and clips to answers on disk; loading the model
           is not part of it. Media are decoded in the same process, so that nobody has a core more, and once more by
           themselves: that time is printed beside the whole. No frames and no features are kept between runs.
  memory   As `vlm-pg bench rollout` measures it; leave it out with --no-memory.
  expected The speed-up expected from FLOPs of the vision tower, of prompts and of decoding, weighed with the model's
           shape. Decoding and resizing of media, the processor and answer extraction are in the times but not in this.
"""

    def __init__(self, arguments: argparse.Namespace, results: Any):
        super().__init__(arguments, results)
        self._files = tempfile.TemporaryDirectory(prefix="vlm_pg_bench_")

    @classmethod
    def points(cls, arguments: argparse.Namespace) -> list[EvalPoint]:
        form = "PREFIX,GENERATIONS,NEW_TOKENS[,QUESTIONS[,VIDEOS]] in whole numbers, such as 4096,8,16,4"
        return parse_points(arguments.points, EvalPoint, (3, 4, 5), form)

    def prepared(self, point: EvalPoint, contestants: Sequence[str]) -> dict[str, Any]:
        folder = Path(self._files.name, "_".join(map(str, point.identity.values())))
        write_files(folder, point)
        return {"folder": str(folder)}

    def finish(self) -> None:
        self._files.cleanup()
        super().finish()

    def medians(self, name: str, point: EvalPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        whole, work = statistics.median(numbers["seconds"]), self._work(name, point)
        found = {
            "median_seconds": whole,
            "seconds_per_question": whole / point.asked,
            "median_media_seconds": statistics.median(numbers["media_seconds"]),
            "prefill_tokens": work.generation.prefill.tokens,
            "videos_encoded": work.towers,
        }
        if "cpu_seconds" in numbers:
            found["median_cpu_seconds"] = statistics.median(numbers["cpu_seconds"])
        return found

    def gain(self, name: str, point: EvalPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        gain: dict[str, Any] = {"speed": theirs["median_seconds"] / ours["median_seconds"]}
        without = [entry["median_seconds"] - entry["median_media_seconds"] for entry in (theirs, ours)]
        if min(without) > 0:
            gain["without_media"] = without[0] / without[1]
        if "median_cpu_seconds" in theirs and "median_cpu_seconds" in ours:
            gain["cpu"] = theirs["median_cpu_seconds"] / ours["median_cpu_seconds"]
        if theirs.get("peak_bytes") and ours.get("peak_bytes"):
            gain["memory"] = theirs["peak_bytes"] / ours["peak_bytes"]
        flops = [self._whole_flops(self._work(side, point), point) for side in (name, OURS)]
        prefill = theirs["prefill_tokens"] / ours["prefill_tokens"]
        return gain | {"bounds": {"flops": flops[0] / flops[1], "prefill_tokens": prefill}}

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = (
            f"  {name:30}{entry['seconds_per_question']:9.3f} s a question; {entry['median_seconds']:.3f} s in all, "
            f"decoding of media takes {entry['median_media_seconds']:.3f} s {gib_words(entry.get('peak_bytes'), 3)}"
        ).rstrip()
        if entry.get("equal_tokens", 1) < 1:
            line += f", {entry['equal_tokens']:.1%} of its greedy tokens equal"
        if (gain := entry.get(self.gain_key)) is None:
            return [line]
        words = f"ours, times as fast: {gain['speed']:.2f}x (expected {gain['bounds']['flops']:.2f}x by FLOPs)"
        if "without_media" in gain:
            words += f", {gain['without_media']:.2f}x without decoding of media"
        words += f", {gain['cpu']:.2f}x in processor seconds" if "cpu" in gain else ""
        words += f"; {memory_words(gain['memory'])} memory" if "memory" in gain else ""
        return [line, f"    {words}"]

    def _work(self, name: str, point: EvalPoint) -> EvalWork:
        work: EvalWork = self.contestants_known[name].work(point)
        return work

    def _whole_flops(self, work: EvalWork, point: EvalPoint) -> float:
        shown, tower = Shown.of(point.prefix), TOWERS[self.arguments.model]
        patches = MERGED_PATCHES * shown.visual_tokens
        towers = work.towers * tower_flops(tower, patches, shown.frame_patches, self.shape.hidden)
        return towers + generation_flops(self.shape, work.generation)


main = EvalRun.main

if __name__ == "__main__":
    run(main)
