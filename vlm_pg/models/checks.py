"""Checks of prompts and responses before they are scored or continued."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_pg.types import Prompt, ResponseGroup, Sample


def media_among(samples: Sequence[Sample], where: object) -> str:
    """How many of the samples, read from ``where``, have media, as a phrase; "" if none has."""
    first, count = "", 0
    for sample in samples:
        if sample.media:
            first, count = first or sample.sample_id, count + 1
    having = f"{count:,} of {len(samples):,} questions in {where} have images or videos"
    return f"{having} (the first is {first!r})" if count else ""


def check_prompt(prompt: Prompt, patches_per_token: int) -> None:
    """Raise ValueError if ids, pixels and grids do not belong together, or do not lie on the CPU."""
    if prompt.input_ids.device.type != "cpu":
        raise ValueError(
            f"Prompt {prompt.sample_id!r} lies on {prompt.input_ids.device}; prompts are packed on the CPU and moved "
            "to the device as one stream. Pass prompt tensors on the CPU."
        )
    patches = 0 if prompt.grid_thw is None else int(prompt.grid_thw.prod(-1).sum())
    pixels = 0 if prompt.pixel_values is None else len(prompt.pixel_values)
    tokens = prompt.num_visual_tokens
    if pixels != patches or tokens * patches_per_token != patches:
        raise ValueError(
            f"Prompt {prompt.sample_id!r} has {tokens} media tokens, {pixels} patches of pixels and grids of {patches} "
            f"patches; {patches_per_token} patches make one token. Take ids, pixels and grids from one processor call, "
            "without truncation."
        )


def check_response_ids(
    group: ResponseGroup, index: int, response: torch.Tensor, vocab_size: int, media_token_ids: Sequence[int]
) -> None:
    """Raise ValueError if a response has ids beyond the vocabulary, or media tokens."""
    name = f"Response {index} of {group.prompt.sample_id!r}"
    lowest, highest = int(response.min()), int(response.max())
    if highest >= vocab_size or lowest < 0:
        raise ValueError(
            f"{name} has token ids from {lowest} to {highest}; the vocabulary is 0 to {vocab_size - 1}. Use this "
            "model's tokenizer."
        )
    found = [token for token in media_token_ids if (response == token).any()]
    if found:
        raise ValueError(
            f"{name} contains media tokens {found}; only the processor may place the ids {list(media_token_ids)}. "
            "Never sample them: vlm_pg.rollout masks them, and transformers' generate does with suppress_tokens."
        )


def checked_responses(group: ResponseGroup) -> tuple[torch.Tensor, ...]:
    """The group's responses; raises ValueError if there is none, or one is no tensor of token ids on the CPU."""
    if not group.responses:
        raise ValueError(f"Group {group.prompt.sample_id!r} has no responses; every group needs at least one.")
    for index, response in enumerate(group.responses):
        if not isinstance(response, torch.Tensor) or response.dim() != 1 or not len(response):
            came = f"shape {tuple(response.shape)}" if isinstance(response, torch.Tensor) else type(response).__name__
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


def chosen_responses(group: ResponseGroup, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The group's responses at these indices; raises ValueError for one that does not exist."""
    responses = checked_responses(group)
    if any(not 0 <= index < len(responses) for index in indices):
        raise ValueError(
            f"Group {group.prompt.sample_id!r} has {len(responses)} responses; the chunk asks for {list(indices)}. "
            f"Indices go from 0 to {len(responses) - 1}."
        )
    return tuple(responses[index] for index in indices)
