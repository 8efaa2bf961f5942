"""A vision tower's attention, within frames or within windows of them, in one variable-length call a layer.

transformers' towers give all frames at once, with cumulative lengths, to the package flash-attn; to torch's own
attention they give each frame or window by itself: thousands of kernels a layer for a long video. This function takes
all of them on the kernels that grouped attention runs on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.cuda import CudaFlashKernel
from vlm_pg.attention.plan import AttentionPlan
from vlm_pg.attention.segments import SegmentCall
from vlm_pg.attention.tree import PrefixTree

# On an attention module: the kernel that it shall run on, wherever its tensors are.
KERNEL = "vlm_pg_frames_kernel"


def frames_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: q, k, v [1, N, T, H] of all frames -> ([1, T, N, H], no weights).

    Args:
        cu_seq_lens_q: [frames + 1], cumulative; every patch attends to all of its own frame or window.
        max_length_q: of the longest one; None: asked of the device, for which the host waits.
    """
    if dropout:
        raise ValueError(f"Attention over frames got dropout={dropout}; only 0 is supported. Set attention_dropout=0.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    kernel = getattr(module, KERNEL, None) or _kernel_for(q.device, q.dtype)
    tokens = len(q)
    if isinstance(kernel, CudaFlashKernel):
        cumulative = cu_seq_lens_q.to(torch.int32)
        longest = int(cumulative.diff().max()) if max_length_q is None else max_length_q
        # The host knows none of the lengths but the longest, which is all that this kernel asks for.
        call = SegmentCall((0, tokens), (0, tokens), (), (), causal=False, at_most=(longest, longest))
        call.fixed_on(cumulative, cumulative)
    else:
        # Others cut tensors by lengths, for which the host would wait on a GPU.
        lengths = tuple(end - start for start, end in pairwise(cu_seq_lens_q.tolist()))
        call = SegmentCall((0, tokens), (0, tokens), lengths, lengths, causal=False)
    plan = AttentionPlan(PrefixTree([tokens], [-1]), (call,), ())
    return grouped_attention(q, k, v, plan, scaling, kernel).unsqueeze(0), None


def _kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """torch's own flash attention; where weights have been moved or cast since it was chosen, whatever runs there."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if CudaFlashKernel.unavailable_because(device, dtype) is None:
        return CudaFlashKernel()
    return select_kernel(device, dtype)
