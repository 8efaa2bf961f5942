"""Policies without weights' values, on which work is counted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vlm_pg.attention.kernels import Kernel
from vlm_pg.bench.paper.replaced import replaced
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower_attention import attend_on


def fake_policy(
    build: Callable[[], Any], settings: ModelSettings, fakes: FakeTensorMode, kernel: Kernel, fused_logits: bool = False
) -> Policy:
    """The policy around the model that ``build`` makes, with fake weights on a fake CPU.

    Autograd asks the driver about CUDA tensors even where these are fake, so a backward pass can only be counted on the
    CPU's; ``kernel`` is the GPU's all the same. ``fused_logits``: so are the kernels that read logits.
    """
    with fakes:
        model = build()
    # The one that any device has, until it is replaced.
    policy = make_policy(model, None, settings.model_copy(update={"attention_kernel": "oracle"}))
    policy.use_kernel(kernel)
    policy.fused_logits = fused_logits
    if policy.dtype != torch.float32:
        # As make_policy has it on a GPU.
        attend_on(policy.model, policy.family, kernel)
    return policy


@contextmanager
def reference_operators(model: Any) -> Iterator[None]:
    """Inside, linear attention is transformers' torch code, also where flash-linear-attention or causal-conv1d is.

    transformers takes these packages' functions in place of its own where they can be imported. They launch compiled
    kernels on tensors with values, so what would be counted depends on the machine, or fails.
    """
    module = sys.modules[type(model).__module__]
    packages = {name: made for name, made in vars(module).items() if _may_be_a_packages(made)}
    with replaced(module, **{name: inspect.unwrap(made) for name, made in packages.items()}):
        yield


def _may_be_a_packages(made: Any) -> bool:
    named = getattr(made, "__name__", "")
    return hasattr(made, "__wrapped__") and ("delta_rule" in named or "causal_conv1d" in named)
