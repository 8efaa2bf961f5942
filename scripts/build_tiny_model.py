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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums are added up in one order only: the weights are reproducible

import torch
import yaml

from data_pipelines.embedded import FIRST_FREE_KEY
from data_pipelines.flashes import SEEN_ORDERS
from scripts.tiny_model.cold_start import ColdStart, Recipe, make_samples, response_text
from scripts.tiny_model.parts import CONTROL_TOKENS, build_model, build_processor, build_tokenizer
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.settings import DEFAULT_INSTRUCTIONS, PromptSettings
from vlm_pg.types import AnswerKind

FIRST_KINDS: tuple[AnswerKind, ...] = ("multiple_choice", "numerical", "ocr", "free_form", "regression")
REPOSITORY = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save; prints what was reached."""
    arguments = _parse(argv)
    recipe = Recipe(seed=arguments.seed)
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    media, prompt = read_settings(REPOSITORY / "configs" / "embedded_task.yaml")
    tokenizer = build_tokenizer(tokenizer_texts(prompt, recipe.seed))
    processor = build_processor(tokenizer)
    model = build_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    with tempfile.TemporaryDirectory() as folder:
        cold_start = ColdStart(model, processor, recipe, media, prompt, Path(folder))
    cold_start.learn_lookup(report=lambda line: print(line, flush=True))
    reached = cold_start.learn_video(report=lambda line: print(line, flush=True))
    save(arguments.out, model, processor, reached)
    print(f"{json.dumps(reached)}\nsaved to {arguments.out}")


def read_settings(path: Path) -> tuple[MediaSettings, PromptSettings]:
    """The media and prompt sections the model will be trained with."""
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    return MediaSettings(**sections["media"]), PromptSettings(**sections["prompt"])


def tokenizer_texts(prompt: PromptSettings, seed: int) -> Iterator[str]:
    """What the tokenizer learns its merges from: the questions and responses of the task, and the built-in prompts."""
    for clip, sample in make_samples(2000, SEEN_ORDERS, (seed, FIRST_FREE_KEY, 0)):
        yield "\n".join((sample.question, *sample.options, prompt.instructions["multiple_choice"]))
        response = response_text(clip)
        for token in CONTROL_TOKENS:
            response = response.replace(token, "")
        yield response
        yield "user\nassistant\n"
    # The kinds of answers there were when the shipped tokenizer was made: another text would make another one.
    yield from (DEFAULT_INSTRUCTIONS[kind] for kind in FIRST_KINDS for _ in range(50))


def save(folder: Path, model: Any, processor: Any, reached: dict[str, float]) -> None:
    """Write the folder that ``from_pretrained`` loads, and what the model is."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "README.md").write_text(
        "# A tiny Qwen2.5-VL\n\n"
        f"{sum(weight.numel() for weight in model.parameters()):,} parameters, fp32: transformers' own "
        "`Qwen2_5_VLForConditionalGeneration` and `Qwen2_5_VLProcessor`.\n"
        "Built by `scripts/build_tiny_model.py` for the embedded default. It knows one task, the order of flashing "
        "colours, and is bad at it:\n"
        f"greedy accuracy {reached['accuracy_seen']:.3f} on new clips of colour orders it was trained on, "
        f"{reached['accuracy_unseen']:.3f} on orders it was not (chance 0.25),\n"
        f"in the right format {reached['format']:.3f} of the time.\n",
        encoding="utf-8",
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and clips (default 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
