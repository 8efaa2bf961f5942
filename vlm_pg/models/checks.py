"""What prompts need of a checkpoint, and checks of prompts and responses before they are scored or continued."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlm_pg.models.family import Family, refuse_media
from vlm_pg.models.tower import PixelGeometry
from vlm_pg.types import Prompt, ResponseGroup, Sample


class PromptInterface:
    """What prompts need of a checkpoint, with or without its weights.

    ``model``: transformers' model, or what stands for it in error messages; ``config``: transformers' configuration;
    ``processor``: a tokenizer for a model that reads text alone.
    """

    model: Any
    config: Any
    processor: Any
    family: Family

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def pixels(self) -> PixelGeometry:
        """How the tower reads pixels."""
        return self.family.pixels(self.config)

    @property
    def pixel_factor(self) -> int:
        """Pixels per side of one visual token: patch size times merge size; 1 without a tower."""
        return self.pixels.token_side

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Positions that the model knows."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def media_token_ids(self) -> tuple[int, ...]:
        """Ids that only the processor may place."""
        vocabulary = None if self.processor is None else self.tokenizer.get_vocab()
        return self.family.media_token_ids(self.config, vocabulary)

    def check_samples(self, samples: Sequence[Sample], where: object) -> None:
        """Raise ModelError if the model reads text alone and one of the samples, read from ``where``, has media."""
        having = [sample.sample_id for sample in samples if sample.media]
        if having and not self.family.reads_media:
            questions = f"{len(having):,} of {len(samples):,} questions in {where}"
            refuse_media(self.model, f"{questions} have images or videos (the first is {having[0]!r})")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError if ids, pixels and grids do not belong together, or do not lie on the CPU."""
        if prompt.input_ids.device.type != "cpu":
            raise ValueError(
                f"Prompt {prompt.sample_id!r} lies on {prompt.input_ids.device}; prompts are packed on the CPU and "
                "moved to the device as one stream. Pass prompt tensors on the CPU."
            )
        patches = 0 if prompt.grid_thw is None else int(prompt.grid_thw.prod(-1).sum())
        pixels = 0 if prompt.pixel_values is None else len(prompt.pixel_values)
        tokens, per_token = prompt.num_visual_tokens, self.pixels.patches_per_token
        if pixels != patches or tokens * per_token != patches:
            raise ValueError(
                f"Prompt {prompt.sample_id!r} has {tokens} media tokens, {pixels} patches of pixels and grids of "
                f"{patches} patches; {per_token} patches make one token. Take ids, pixels and grids from one processor "
                "call, without truncation."
            )

    def check_response_ids(self, response: torch.Tensor, name: str) -> None:
        """Raise ValueError if a response has ids beyond the vocabulary, or media tokens."""
        lowest, highest = int(response.min()), int(response.max())
        if highest >= self.vocab_size or lowest < 0:
            raise ValueError(
                f"{name} has token ids from {lowest} to {highest}; the vocabulary is 0 to {self.vocab_size - 1}. Use "
                "this model's tokenizer."
            )
        found = [token for token in self.media_token_ids if (response == token).any()]
        if found:
            raise ValueError(
                f"{name} contains media tokens {found}; only the processor may place the ids "
                f"{list(self.media_token_ids)}. Never sample them: vlm_pg.rollout masks them, and transformers' "
                "generate does with suppress_tokens."
            )

    def check_length(self, prompt: Prompt, response_tokens: int) -> None:
        """Raise SampleError ("too_long_for_model") if prompt and response exceed the positions the model knows."""
        prompt.check_length(response_tokens, self.max_positions)


def checked_responses(group: ResponseGroup) -> tuple[Tensor, ...]:
    """The group's responses; raises ValueError if there is none, or one is no tensor of token ids on the CPU."""
    if not group.responses:
        raise ValueError(f"Group {group.prompt.sample_id!r} has no responses; every group needs at least one.")
    for index, response in enumerate(group.responses):
        if not isinstance(response, Tensor) or response.dim() != 1 or not len(response):
            came = f"shape {tuple(response.shape)}" if isinstance(response, Tensor) else type(response).__name__
            raise ValueError(
                f"Response {index} of group {group.prompt.sample_id!r} is {came}; "
                "a response is a 1-D tensor of at least one token id."
            )
        if response.dtype != torch.int64 or response.device.type != "cpu":
            raise ValueError(
                f"Response {index} of group {group.prompt.sample_id!r} is {response.dtype} on {response.device}; token "
                "ids are int64 on the CPU. Pass response.long().cpu()."
            )
    return group.responses


def chosen_responses(group: ResponseGroup, indices: Sequence[int]) -> tuple[Tensor, ...]:
    """The group's responses at these indices; raises ValueError for one that does not exist."""
    responses = checked_responses(group)
    if any(not 0 <= index < len(responses) for index in indices):
        raise ValueError(
            f"Group {group.prompt.sample_id!r} has {len(responses)} responses; the chunk asks for {list(indices)}. "
            f"Indices go from 0 to {len(responses) - 1}."
        )
    return tuple(responses[index] for index in indices)
