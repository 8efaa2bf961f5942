"""TRL's trainers on the tiny Qwen2.5-VL, with what they did in one run written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from trl.trainer.grpo_config import GRPOConfig

from tests.support.tiny import tiny_model, tiny_processor

NUM_PROMPTS, NUM_GENERATIONS = 2, 4
MAX_NEW_TOKENS, TEMPERATURE = 8, 0.7
MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")

Inputs = dict[str, Any]

# What every run has.
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": NUM_PROMPTS * NUM_GENERATIONS,
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": MAX_NEW_TOKENS,
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "bf16": False,
    "gradient_checkpointing": False,
    "temperature": TEMPERATURE,
    "seed": 3,
    "use_cpu": True,
    "max_grad_norm": 0.0,
    "model_init_kwargs": {"dtype": "float32"},
    "learning_rate": 1e-3,
    "disable_tqdm": True,
}


def picture_questions(sizes: list[tuple[int, int]]) -> Any:
    rng = np.random.default_rng(0)
    texts = ("Which colour is shown first?", "How many times does the light blink in the video?", "What happens?")
    rows = [
        {
            "prompt": [{"role": "user", "content": texts[i % len(texts)]}],
            "images": [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))],
        }
        for i, size in enumerate(sizes)
    ]
    return datasets.Dataset.from_list(rows)


def count_letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in c[0]["content"])) + len(c[0]["content"]) for c in completions]


def starting_model(family: str = "qwen2_5_vl") -> Any:
    """The weights that every run starts from; some responses end early, so that lengths differ and some are cut off."""
    model = tiny_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[model.generation_config.eos_token_id] *= 4
    return model


def never_sampled(*tokens: str) -> dict[str, Any]:
    """The trainer argument that keeps media tokens, and ``tokens``, out of completions."""
    ids = tiny_processor().tokenizer.convert_tokens_to_ids([*MEDIA_TOKENS, *tokens])
    return {"generation_kwargs": {"suppress_tokens": ids}}


class Recorded:
    """Keeps what training did: inputs of the loss, rewards, losses, gradients before the optimizer, logged metrics.

    Args:
        trainer_class: TRL's or ours.
        alter: changes the inputs of the loss before they are recorded and used.
        config_class: what ``settings`` are arguments of.
        family: of the tiny model.
        processing: makes of the tiny processor what the trainer gets.
        pictures: one with each question.
        trainer: more arguments of the trainer.
    """

    def __init__(
        self,
        trainer_class: type,
        folder: Path,
        peft_config: Any = None,
        alter: Callable[[Inputs], Inputs] = lambda inputs: inputs,
        config_class: type = GRPOConfig,
        family: str = "qwen2_5_vl",
        processing: Callable[[Any], Any] = lambda processor: processor,
        pictures: bool = True,
        trainer: dict[str, Any] | None = None,
        **settings: Any,
    ):
        options = OPTIONS | {"output_dir": str(folder / trainer_class.__name__)} | never_sampled()
        if not (folder / "model").exists():
            starting_model(family).save_pretrained(folder / "model")
        processor = tiny_processor(family)
        if hasattr(processor, "image_processor"):
            processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
        if "activation_checkpointing" in settings:
            del options["gradient_checkpointing"]
        self.rewards: dict[tuple[int, ...], float] = {}
        data = picture_questions([(56, 84), (84, 56), (56, 56), (28, 56)]), picture_questions([(56, 56)])
        if not pictures:
            data = data[0].remove_columns("images"), data[1].remove_columns("images")
        arguments: dict[str, Any] = {
            "model": str(folder / "model"),
            "reward_funcs": self._reward,
            "args": config_class(**(options | settings)),
            "train_dataset": data[0],
            "eval_dataset": data[1],
            "processing_class": processing(processor),
            "peft_config": peft_config,
        }
        self.trainer = trainer_class(**(arguments | (trainer or {})))
        self.inputs: list[Inputs] = []
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        compute_loss = self.trainer.compute_loss

        def recorded_loss(model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
            inputs = alter(dict(inputs))
            loss = compute_loss(model, inputs, *args, **kwargs)
            self.inputs.append(inputs)
            self.losses.append(float(loss.detach()))
            return loss

        self.trainer.compute_loss = recorded_loss
        self.trainer.create_optimizer()
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self._keep_gradients())

    def _reward(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = count_letters(completions)
        self.rewards |= {tuple(ids): reward for ids, reward in zip(completion_ids, rewards, strict=True)}
        return rewards

    def _keep_gradients(self) -> None:
        named = self.trainer.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    @property
    def logged(self) -> dict[str, float]:
        history = self.trainer.state.log_history
        return next(entry for entry in history if "entropy" in entry)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.trainer.model.named_parameters()}


def largest_error(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any parameter's gradient (or change), and whose it is."""
    assert mine.keys() == expected.keys()
    largest = max(float(g.norm()) for g in expected.values())
    assert largest > 0
    # Key biases cancel in the softmax: their gradient is rounding, so it is measured by the largest one.
    scales = {name: max(float(gradient.norm()), 1e-3 * largest) for name, gradient in expected.items()}
    return max((float((mine[name] - gradient).norm()) / scales[name], name) for name, gradient in expected.items())
