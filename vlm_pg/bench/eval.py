"""``vlm-pg bench eval``: answering questions on videos, from files to answers on disk."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from vlm_pg.bench.contestant import Contestant
from vlm_pg.bench.evaluation.shown import Shown
from vlm_pg.bench.flops import (
    forward_flops,
    generation_bytes,
    generation_flops,
    parameter_count,
    tower_flops,
)
from vlm_pg.bench.grid import EvalPoint, informative_first, parse_points
from vlm_pg.bench.options import measurement_parser
from vlm_pg.bench.rollout import READ_ROWS
from vlm_pg.bench.runner import PointsRun, gib_words, memory_words
from vlm_pg.bench.shapes import MERGED_PATCHES, PATCH_PIXELS, TOWERS
from vlm_pg.bench.work import (
    EvalWork,
    apart_evaluation,
    batched_evaluation,
    repeated_evaluation,
    shared_evaluation,
)

PREFIXES, GENERATIONS, NEW_TOKENS, QUESTIONS, VIDEOS = (4096,), (8,), (16, 128), (1, 4), (1,)
# Pixels of prompts are float32 before they reach the tower.
PIXEL_BYTES = 4

OURS, APART, BATCHED = "ours", "ours-one-question-a-video", "transformers-generate-batched"
_FOLDER = "vlm_pg.bench.evaluation"
CONTESTANTS = {
    OURS: Contestant(
        "what vlm-pg eval runs (Evaluator, its prompt source, reader of whole outputs, answer files): a video decoded "
        "and encoded once for all of its questions, each question once for its G answers",
        shared_evaluation,
        f"{_FOLDER}.ours:together",
    ),
    "transformers-generate": Contestant(
        "question by question: qwen-vl-utils' process_vision_info (frames of the last video are kept for its next "
        "question), the model's processor, generate(do_sample=True, num_return_sequences=G), batch_decode, our reader, "
        "a line of JSON; the release runs the tower once per question and the prompt once per answer; sdpa, on a GPU "
        "flash_attention_2 where installed",
        repeated_evaluation,
        f"{_FOLDER}.transformers_generate:one_by_one",
        "qwen_vl_utils",
    ),
    APART: Contestant(
        "ours, as many questions, each on a video of its own (only where a video has several questions)",
        apart_evaluation,
        f"{_FOLDER}.ours:apart",
    ),
    BATCHED: Contestant(
        "transformers-generate with four questions a call, padded on the left (only where there are several)",
        batched_evaluation,
        f"{_FOLDER}.transformers_generate:batched",
        "qwen_vl_utils",
    ),
}

_WHAT = """\
Speed and peak memory of evaluation: Q questions on each of V videos of about P visual tokens, G answers of N tokens to
each, sampled at temperature 1. Clips are rendered and encoded by the measurement (H.264, 640x360, 10 frames a second)
and decoded by everybody in every run, at 2 frames a second, up to 256 visual tokens for two frames. The model is a
Qwen2.5-VL with random weights of the size --model, its vision tower included. Before anything is timed the contestants'
prompts are compared, ids and pixels, and in fp32 their greedy answers; a difference is an error, unless a plain forward
finds the two tokens' logits tied there (up to 1e-4 apart).
"""

_HOW = """\
how it is measured:
  time     One process per point. Each contestant evaluates once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times; medians are compared. A run is from records and clips to answers on disk; loading the model
           is not part of it. Media are decoded in the same process, so that nobody has a core more, and once more by
           themselves: that time is printed beside the whole. No frames and no features are kept between runs.
  memory   As `vlm-pg bench rollout` measures it; leave it out with --no-memory.
  bounds   FLOPs of the vision tower, of prompts and of decoding, weighed with the model's shape. Decoding and resizing
           of media, the processor and reading answers are in the times and not in the bounds.

examples:
  vlm-pg bench eval --points 4096,8,16 4096,8,128,4
  vlm-pg bench eval --prefix 4096 --new-tokens 16 128 --questions 1 8 --threads 2 --out eval.json
  vlm-pg bench eval --prefix 4096 16384 --model 7b --dtype bf16
"""


class EvalRun(PointsRun[EvalPoint]):
    """One run over points of evaluation."""

    measurement = "eval"
    contestants_known = CONTESTANTS
    gain_key = "ours_gain"
    comparable = ("model", "dtype", "device", "repeats", "threads")
    case = f"{_FOLDER}.case:EvalCase"

    def __init__(self, arguments: argparse.Namespace, results: Any):
        self.tower = TOWERS[arguments.model]
        super().__init__(arguments, results)
        self._files = tempfile.TemporaryDirectory(prefix="vlm_pg_bench_")

    @staticmethod
    def parser() -> argparse.ArgumentParser:
        parser, points, _ = measurement_parser("eval", _WHAT, _HOW, CONTESTANTS, draws=False)
        points.add_argument(
            "--points",
            nargs="+",
            metavar="P,G,N[,Q[,V]]",
            help="exactly these: visual tokens, answers, new tokens, questions a video (1), videos (1)",
        )
        points.add_argument("--prefix", type=int, nargs="+", metavar="P", help="visual tokens of a video, about")
        points.add_argument(
            "--num-generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="answers per question"
        )
        points.add_argument(
            "--new-tokens", type=int, nargs="+", default=NEW_TOKENS, metavar="N", help="tokens per answer"
        )
        points.add_argument(
            "--questions", type=int, nargs="+", default=QUESTIONS, metavar="Q", help="questions on each video"
        )
        points.add_argument("--videos", type=int, nargs="+", default=VIDEOS, metavar="V", help="videos")
        parser.set_defaults(model="mid")
        return parser

    @staticmethod
    def points(arguments: argparse.Namespace) -> list[EvalPoint]:
        if arguments.points:
            form = "PREFIX,GENERATIONS,NEW_TOKENS[,QUESTIONS[,VIDEOS]] in whole numbers, such as 4096,8,16,4"
            return parse_points(arguments.points, EvalPoint, (3, 4, 5), form)
        axes = (
            arguments.prefix or PREFIXES,
            arguments.num_generations,
            arguments.new_tokens,
            arguments.questions,
            arguments.videos,
        )
        return informative_first(EvalPoint(*values) for values in product(*axes))

    def contestants_at(self, point: EvalPoint) -> list[str]:
        left_out = {name for name, needed in ((APART, point.questions), (BATCHED, point.asked)) if needed == 1}
        return [name for name in self.contestants if name not in left_out]

    def prepared(self, point: EvalPoint, contestants: Sequence[str]) -> dict[str, Any]:
        from vlm_pg.bench.evaluation.files import write_files

        folder = Path(self._files.name, "_".join(map(str, point.identity.values())))
        write_files(folder, point, apart=APART in contestants)
        return {"folder": str(folder)}

    def finish(self) -> None:
        self._files.cleanup()
        super().finish()

    def point_of(self, record: dict[str, Any]) -> EvalPoint:
        return EvalPoint(*(record[key] for key in ("prefix", "generations", "new_tokens", "questions", "videos")))

    def flops(self, name: str, point: EvalPoint) -> float:
        """As of `bench rollout`: decoding few rows waits for the weights; and the tower's."""
        work = self._work(name, point)
        reading = work.generation.steps * READ_ROWS * 2 * parameter_count(self.shape)
        prefill, decode = (forward_flops(self.shape, one) for one in (work.generation.prefill, work.generation.decode))
        return self._tower_flops(work, point) + prefill + decode + reading

    def peak_bytes(self, name: str, point: EvalPoint) -> float:
        work = self._work(name, point)
        prompts = 1 if name == "transformers-generate" else work.towers
        patches = MERGED_PATCHES * Shown.of(point.prefix).visual_tokens
        pixels = 2 * prompts * patches * PATCH_PIXELS * PIXEL_BYTES
        return generation_bytes(self.shape, work.generation, self.element_bytes) + pixels

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
        gain["bounds"] = {
            "flops": flops[0] / flops[1],
            "prefill_tokens": theirs["prefill_tokens"] / ours["prefill_tokens"],
        }
        return gain

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = (
            f"  {name:30}{entry['seconds_per_question']:9.3f} s a question; {entry['median_seconds']:.3f} s in all, "
            f"decoding of media takes {entry['median_media_seconds']:.3f} s {gib_words(entry.get('peak_bytes'), 3)}"
        ).rstrip()
        if entry.get("equal_tokens", 1) < 1:
            line += f", {entry['equal_tokens']:.1%} of its greedy tokens equal"
        gain = entry.get(self.gain_key)
        return [line, f"    {gain_words(name, gain)}"] if gain else [line]

    def _work(self, name: str, point: EvalPoint) -> EvalWork:
        work: EvalWork = self.contestants_known[name].work(point)
        return work

    def _tower_flops(self, work: EvalWork, point: EvalPoint) -> float:
        shown = Shown.of(point.prefix)
        patches = MERGED_PATCHES * shown.visual_tokens
        return work.towers * tower_flops(self.tower, patches, shown.frame_patches, self.shape.hidden)

    def _whole_flops(self, work: EvalWork, point: EvalPoint) -> float:
        return self._tower_flops(work, point) + generation_flops(self.shape, work.generation)


def gain_words(name: str, gain: dict[str, Any]) -> str:
    """Ours against one contestant, in times as fast: what was reached beside what counting allows."""
    what = "several questions on one video, times as fast a question" if name == APART else "ours, times as fast"
    words = f"{what}: {gain['speed']:.2f}x (bound {gain['bounds']['flops']:.2f}x by FLOPs)"
    if "without_media" in gain:
        words += f", {gain['without_media']:.2f}x without decoding of media"
    if "cpu" in gain:
        words += f", {gain['cpu']:.2f}x in processor seconds"
    if "memory" in gain:
        words += f"; {memory_words(gain['memory'])} memory"
    return words


main = EvalRun.main
