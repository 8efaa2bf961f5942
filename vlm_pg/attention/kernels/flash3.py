"""FlashAttention-3 (``flash_attn_3``, its interface module as built from the repository's ``hopper`` folder).

Versions differ: the interface lies on its own or inside the package, optional tensors have defaults or not, and the
backward's flag is ``causal`` or ``is_causal``. Names are matched once, when the kernel is made.
"""

from __future__ import annotations

from vlm_pg.attention.kernels.entry_points import bind, import_first
from vlm_pg.attention.kernels.flash_package import EntryPoints, FlashPackageKernel

_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_TENSORS = {"q": ["q"], "k": ["k"], "v": ["v"]}
_OPTIONS = {"scale": ["softmax_scale"], "causal": ["causal", "is_causal"]}
_LENGTHS = {"cu_q": ["cu_seqlens_q"], "cu_k": ["cu_seqlens_k"], "max_q": ["max_seqlen_q"], "max_k": ["max_seqlen_k"]}
_RAGGED = {**_TENSORS, **_LENGTHS, **_OPTIONS, "used_k": ["seqused_k"]}
_BACKWARD = {"grad_out": ["dout"], "out": ["out"], "lse": ["softmax_lse"]}
_GRADS = {"grad_q": ["dq"], "grad_k": ["dk"], "grad_v": ["dv"]}
# Key-value caches, paging, rotary embedding and fp8 scales: not used here.
_UNUSED_FORWARD = (
    *("k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table"),
    *("kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)
_UNUSED_BACKWARD = ("sequed_q", "sequed_k", "seqused_q", "seqused_k")
_LENGTH_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class Flash3Kernel(FlashPackageKernel):
    """Hopper's own kernels (asynchronous copies and matrix products): the fastest choice there."""

    name = "flash-attn-3"
    majors = (9,)

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(_MODULES)
        return (
            bind(module, "_flash_attn_forward", {**_TENSORS, **_LENGTHS, **_OPTIONS}, absent=_UNUSED_FORWARD),
            bind(
                module,
                "_flash_attn_backward",
                {**_BACKWARD, **_TENSORS, **_GRADS, **_LENGTHS, **_OPTIONS},
                absent=_UNUSED_BACKWARD,
            ),
            bind(module, "_flash_attn_forward", {**_TENSORS, **_OPTIONS}, absent=(*_UNUSED_FORWARD, *_LENGTH_NAMES)),
            bind(module, "_flash_attn_forward", _RAGGED, absent=set(_UNUSED_FORWARD) - {"seqused_k"}),
        )
