"""Measures that save memory, chosen at a run's start, once its model and optimizer exist."""

from __future__ import annotations

from typing import Any

import torch

from vlm_pg.config import RunConfig
from vlm_pg.distributed import RankLayout, min_over_ranks
from vlm_pg.memory import free_bytes
from vlm_pg.models.memory_choice import Decision, Need, decide
from vlm_pg.models.memory_sizes import LanguageShape, LanguageSizes, TowerShape, TowerSizes
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.memory import most_kept

# fp32 numbers a trained weight: AdamW's two moments.
_MOMENTS = 2
# Copies of a chunk of fp32 logits at a time; more where entropies go back, too.
_LOGITS_COPIES, _LOGITS_COPIES_OF_ENTROPIES = 3, 6


def choose_memory(config: RunConfig, policy: Policy, reference: Any, ranks: RankLayout) -> Decision:
    """Decide on what ``config.model`` leaves to the run, the same on all ranks, and let the models use it.

    Args:
        reference: what a KL term measures from; it runs in the same tiles and pieces.
    """
    device = policy.device
    free = free_bytes(device) - later_allocations(config, policy.model)
    if config.rollout.engine == "in_process" and config.rollout.cuda_graphs:
        free -= most_kept(device)
    free = int(min_over_ranks({"free": float(max(0, free))}, device)["free"])
    decision = decide(config.model, _need(config, policy, ranks, free))
    policy.use_memory(decision.choice)
    if reference is not None and hasattr(reference, "use_memory"):
        reference.use_memory(decision.choice)
    return decision


def later_allocations(config: RunConfig, model: torch.nn.Module) -> int:
    """Bytes allocated after the engine is made and held for the rest of the run: gradients, the moments that AdamW
    makes in its first step (DeepSpeed makes them at once), and one chunk of logits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    copies = _LOGITS_COPIES_OF_ENTROPIES if config.algorithm.entropy_coef else _LOGITS_COPIES
    # Where auto makes chunks larger, a layer's backward takes more, which is counted with the stream.
    logits = copies * config.model.least_logits_bytes
    if config.training.engine == "deepspeed":
        return gradients + logits
    masters = 4 * numbers if config.model.dtype != "fp32" else 0
    return gradients + masters + _MOMENTS * 4 * numbers + logits


def _need(config: RunConfig, policy: Policy, ranks: RankLayout, free: int) -> Need:
    model, element = policy.model.config, policy.dtype.itemsize
    prompts = 1  # a frozen tower takes them one by one
    if policy.vision.trains:
        prompts = -(-config.training.prompts_per_step // ranks.data_size)
    size, shape = ranks.sequence_size, LanguageShape.of(policy.family, model)
    tower = TowerShape.of(policy.family, model)
    # Where there are fewer key-value heads than sequence ranks each rank has one, of all rows.
    repeated = max(1, size // shape.kv_heads)
    media_tokens = prompts * config.prompt.max_prompt_tokens
    if policy.vision.trains:
        # Frames are divided, none is cut. A frozen tower also runs for one process alone.
        frame = -(-config.media.max_pixels // policy.pixel_factor**2)
        media_tokens = max(-(-media_tokens // size), min(media_tokens, frame))
    return Need(
        LanguageSizes(shape, element, repeated),
        TowerSizes(tower, element) if tower else None,
        rows=-(-config.training.micro_batch_tokens // size),
        media_tokens=media_tokens,
        free=free,
        device=str(policy.device),
    )
