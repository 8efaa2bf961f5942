"""Rebuild ``assets/tiny-qwen2_5-vl``, the model of the embedded default, from nothing but this repository.

    python -m scripts.build_tiny_model --out assets/tiny-qwen2_5-vl

A real Qwen2.5-VL (transformers' classes, its processor, a small tokenizer of its own) with 0.25 million parameters,
trained under supervision until it answers in the right form and reads the video poorly. Takes some minutes on one core,
and gives the same weights again on the same machine. Neither the clips of the data set nor the held-out colour orders
are shown to it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums are added up in one order only: the weights are reproducible

import torch
import yaml
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from data_pipelines.embedded import to_sample
from data_pipelines.flashes import SEEN_ORDERS
from scripts.tiny_model.cold_start import CONFIG, Recipe, clips_of, learn_lookup, learn_video, write_sets
from scripts.tiny_model.parts import build_model, build_processor, build_tokenizer
from vlm_pg.prompts.settings import DEFAULT_INSTRUCTIONS, PromptSettings
from vlm_pg.types import AnswerKind, MediaRef

FIRST_KINDS: tuple[AnswerKind, ...] = ("multiple_choice", "numerical", "ocr", "free_form", "regression")


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save; prints what was reached."""
    arguments = _parse(argv)
    recipe = Recipe(seed=arguments.seed)
    torch.manual_seed(recipe.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        start = folder / "start"
        save_start(start, recipe)
        write_sets(recipe, folder)
        checkpoint, reached = learn_video(recipe, learn_lookup(recipe, start, folder), folder)
        save(arguments.out, checkpoint, reached)
    print(f"{json.dumps(reached)}\nsaved to {arguments.out}")


def save_start(folder: Path, recipe: Recipe) -> None:
    """The model with random weights, and its processor."""
    prompt = PromptSettings(**yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["prompt"])
    tokenizer = build_tokenizer(tokenizer_texts(prompt, recipe.seed))
    model = build_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    model.eval().save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)


def tokenizer_texts(prompt: PromptSettings, seed: int) -> Iterator[str]:
    """What the tokenizer learns its merges from: the questions and responses of the task, and the built-in prompts."""
    for clip in clips_of(Recipe(seed=seed), 2000, SEEN_ORDERS, 0):
        sample = to_sample(clip, "", MediaRef("video", ""), "")
        yield "\n".join((sample.question, *sample.options, prompt.instructions["multiple_choice"]))
        yield sample.response.replace("\n", "")
        yield "user\nassistant\n"
    # The kinds of answers there were when the shipped tokenizer was made: another text would make another one.
    yield from (DEFAULT_INSTRUCTIONS[kind] for kind in FIRST_KINDS for _ in range(50))


def save(folder: Path, checkpoint: Path, reached: dict[str, float]) -> None:
    """Write the folder that ``from_pretrained`` loads, and what the model is."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint)
    model.eval().save_pretrained(folder)
    Qwen2_5_VLProcessor.from_pretrained(checkpoint).save_pretrained(folder)
    (folder / "README.md").write_text(
        "# A tiny Qwen2.5-VL\n\n"
        f"{sum(weight.numel() for weight in model.parameters()):,} parameters, fp32: transformers' own "
        "`Qwen2_5_VLForConditionalGeneration` and `Qwen2_5_VLProcessor`.\n"
        "Built by `scripts/build_tiny_model.py` for the embedded default, by supervised training. It knows one task, "
        "the order of flashing\ncolours, and is bad at it: greedy accuracy "
        f"{reached['accuracy_seen']:.3f} on new clips of colour orders it was trained on,\n"
        f"{reached['accuracy_unseen']:.3f} on orders it was not (chance 0.25).\n",
        encoding="utf-8",
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--work", type=Path, help="folder for data and runs (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and clips (default 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
