"""The reference policy of the KL term: a frozen copy of the starting point, or the policy without its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import adapter_disabled
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import ResponseGroup


class AdapterFreeReference:
    """The policy with its adapter disabled, without a second copy of the weights; results carry no gradient."""

    def __init__(self, policy: Policy):
        if policy.vision.trains:
            raise ModelError(
                "The vision tower trains, so the policy without its adapter has other visual features. Load a second "
                "policy as the reference, or set algorithm.kl_coef=0."
            )
        self.policy = policy
        self.settings = policy.settings
        self.vision = policy.vision
        self.join_features = policy.join_features

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """As ``Policy.forward``."""
        with adapter_disabled(self.policy.model):
            return self.policy(*args)

    @torch.no_grad()
    def logprobs(
        self, groups: Sequence[ResponseGroup], *, temperature: float = 1.0, sequence: SequenceGroup = SINGLE_SP_RANK
    ) -> list[list[Tensor]]:
        """As ``Policy.logprobs``."""
        with adapter_disabled(self.policy.model):
            return self.policy.logprobs(groups, temperature=temperature, sequence=sequence)


ScoringPolicy = Policy | AdapterFreeReference


def scoring_phase(reference: ScoringPolicy | None) -> AbstractContextManager[None]:
    """Context of a phase in which ranks score with ``reference`` independently; on all ranks alike.

    Without its adapter a layer gathers fewer weights (ZeRO-3). So in lockstep the adapter must be off on ranks that
    only help others, too, until the last one is done.
    """
    if isinstance(reference, AdapterFreeReference):
        return adapter_disabled(reference.policy.model)
    return nullcontext()


def load_reference(settings: ModelSettings, policy: Policy, path: str | None = None) -> ScoringPolicy:
    """The starting point of ``policy``: without its adapter, else a frozen copy (a frozen vision tower is shared).

    Args:
        path: of another reference, which reads the same prompts.

    Raises:
        ModelError: the model at ``path`` is of another family or has another tokenizer.
    """
    if path is None and settings.lora is not None:
        return AdapterFreeReference(policy)
    reference = load_frozen(settings, policy, path or settings.path)
    if path is None and policy.family.reads_media and not policy.vision.trains:
        reference.use_tower_of(policy)
    return reference


def load_frozen(settings: ModelSettings, policy: Policy, path: str) -> Policy:
    """Another model that reads the prompts of ``policy``, without gradients.

    Raises:
        ModelError: it is of another family or has another tokenizer.
    """
    forward_only = {"gradient_checkpointing": False, "offload_layer_inputs": False, "offload_prefix_states": False}
    settings = settings.model_copy(update={"path": path, "train": ("language",), "lora": None, **forward_only})
    other = load_policy(path, device=policy.device, settings=settings)
    other.requires_grad_(False)
    tokenizers = (getattr(one.processor, "tokenizer", one.processor) for one in (policy, other))
    vocabulary, others = (tokenizer.get_vocab() for tokenizer in tokenizers)
    if other.family.model_type != policy.family.model_type or vocabulary != others:
        what = "another tokenizer" if other.family.model_type == policy.family.model_type else "another family"
        raise ModelError(
            f"{path} ({other.family.model_type}, {len(others):,} tokens) has {what} than the policy "
            f"({policy.family.model_type}, {len(vocabulary):,} tokens). Both models read the same token ids and "
            "pixels. Choose a model of the policy's own family."
        )
    return other
