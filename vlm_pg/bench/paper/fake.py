"""Policies without weights' values, on which work is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vlm_pg.attention.kernels import Kernel
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower_attention import attend_on


def fake_policy(build: Callable[[], Any], settings: ModelSettings, fakes: FakeTensorMode, kernel: Kernel) -> Policy:
    """The policy around the model that ``build`` makes, with fake weights on a fake CPU.

    Autograd asks the driver about CUDA tensors even where these are fake, so a backward pass can only be counted on the
    CPU's; ``kernel`` is the GPU's all the same.
    """
    with fakes:
        model = build()
    # The one that any device has, until it is replaced.
    policy = make_policy(model, None, settings.model_copy(update={"attention_kernel": "oracle"}))
    policy.use_kernel(kernel)
    if policy.dtype != torch.float32:
        # As make_policy has it on a GPU.
        attend_on(policy.model, policy.family, kernel)
    return policy
