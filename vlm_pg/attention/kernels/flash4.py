"""FlashAttention-4 (package ``flash-attn-4``, module ``flash_attn.cute``; read at 4.0.0b36), Hopper and Blackwell.

Kernels are compiled when a head dim, a dtype and a kind of call first occur, so the self-check at start takes longer.
"""

from __future__ import annotations

from vlm_pg.attention.kernels.entry_points import bind, import_first
from vlm_pg.attention.kernels.flash_package import EntryPoints, FlashPackageKernel

_TENSORS = {"q": ["q"], "k": ["k"], "v": ["v"]}
_OPTIONS = {"scale": ["softmax_scale"], "causal": ["causal"]}
_LENGTHS = {"cu_q": ["cu_seqlens_q"], "cu_k": ["cu_seqlens_k"], "max_q": ["max_seqlen_q"], "max_k": ["max_seqlen_k"]}
_RAGGED = {**_TENSORS, **_LENGTHS, **_OPTIONS, "used_k": ["seqused_k"]}
_BACKWARD = {"grad_out": ["dout"], "out": ["out"], "lse": ["lse"]}
_GRADS = {"grad_q": ["dq"], "grad_k": ["dk"], "grad_v": ["dv"]}
# The log-sum-exp is only computed on request where no input asks for a gradient, and inside ours none does.
_WITH_LSE = {"return_lse": True}


class Flash4Kernel(FlashPackageKernel):
    """The only one written for Blackwell; its backward starts at capability 9.0."""

    name = "flash-attn-4"
    by_name_only = True  # every release so far is a beta
    majors = (9, 10, 11, 12)

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(["flash_attn.cute.interface"])
        return (
            bind(module, "_flash_attn_fwd", {**_TENSORS, **_LENGTHS, **_OPTIONS}, _WITH_LSE),
            bind(module, "_flash_attn_bwd", {**_BACKWARD, **_TENSORS, **_GRADS, **_LENGTHS, **_OPTIONS}),
            bind(module, "_flash_attn_fwd", {**_TENSORS, **_OPTIONS}, _WITH_LSE),
            bind(module, "_flash_attn_fwd", _RAGGED, _WITH_LSE),
        )
