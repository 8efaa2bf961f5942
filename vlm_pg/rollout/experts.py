"""Whether the experts of a mixture can be part of a CUDA graph: the host must not ask who got how many tokens."""

from __future__ import annotations

import torch

from vlm_pg.models.liger import liger_of
from vlm_pg.models.policy import Policy

# torch's grouped matrix product reads the offsets of the experts on the device for bf16 on these major capabilities;
# elsewhere it copies them to the host and loops (GroupedBlas.cpp and GroupedMMUtils.h of torch 2.11 to 2.15).
_GROUPED_MAJORS = (9, 10)


def experts_wait(policy: Policy) -> str | None:
    """Why the host waits for the device in a mixture's layers on CUDA, as end of a sentence; None: it does not.

    Of transformers' implementations "grouped_mm", its default, and "batched_mm" have shapes that depend on the number
    of rows alone; "eager" loops over the experts that were hit (``nonzero``).
    """
    if torch.version.hip is not None and _implementation(policy) == "grouped_mm":
        return "torch's grouped matrix product may copy the experts' offsets to the host on ROCm"
    return experts_wait_at(policy, torch.cuda.get_device_capability(policy.device))


def experts_wait_at(policy: Policy, capability: tuple[int, int]) -> str | None:
    """As ``experts_wait``, on a CUDA device of this compute capability."""
    if "experts" in liger_of(policy.model).parts:
        return "liger-kernel's experts are not known to leave the host alone (model.liger)"
    implementation = _implementation(policy)
    if implementation == "batched_mm":
        return None
    if implementation != "grouped_mm":
        return f"the experts' implementation {implementation!r} of transformers may ask which of them were hit"
    major, minor = capability
    if policy.dtype != torch.bfloat16 or major not in _GROUPED_MAJORS:
        dtype = str(policy.dtype).removeprefix("torch.")
        return (
            f"torch's grouped matrix product copies the experts' offsets to the host in {dtype} at compute capability "
            f"{major}.{minor}; it does not in bfloat16 at 9.x and 10.x"
        )
    return None


def _implementation(policy: Policy) -> str:
    return getattr(policy.model.config.get_text_config(), "_experts_implementation", None) or "eager"
