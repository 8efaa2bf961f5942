"""FlashAttention-2 from the package ``flash-attn`` (read at 2.8.3; other versions are judged by their signatures)."""

from __future__ import annotations

from vlm_pg.attention.kernels.entry_points import bind, import_first
from vlm_pg.attention.kernels.flash_package import EntryPoints, FlashPackageKernel

_TENSORS = {"q": ["q"], "k": ["k"], "v": ["v"]}
_OPTIONS = {"scale": ["softmax_scale"], "causal": ["causal"]}
_LENGTHS = {"cu_q": ["cu_seqlens_q"], "cu_k": ["cu_seqlens_k"], "max_q": ["max_seqlen_q"], "max_k": ["max_seqlen_k"]}
_RAGGED = {**_TENSORS, **_LENGTHS, **_OPTIONS, "used_k": ["seqused_k"]}
_RESULTS = {"grad_out": ["dout"], "out": ["out"], "lse": ["softmax_lse"]}
_GRADS = {"grad_q": ["dq"], "grad_k": ["dk"], "grad_v": ["dv"]}
_PLAIN_SOFTMAX = {"dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}


class Flash2Kernel(FlashPackageKernel):
    """The stand-alone build of the algorithm that torch carries too: for comparisons and other torch versions.

    Its varlen forward takes a shortcut when the longest query has one token: it reshapes q to [segments, ...], which
    fails when another segment has no query. Announcing a maximum of 2 avoids it; lengths come from ``cu_seqlens``.
    """

    name = "flash-attn-2"
    majors = (8, 9, 10, 11, 12)
    least_max_query = 2

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(["flash_attn.flash_attn_interface"])
        fixed = {**_PLAIN_SOFTMAX, "alibi_slopes": None}
        forward_only = {**fixed, "return_softmax": False}
        # Not deterministic: dq is summed with atomic adds, as in torch's own flash backward.
        backward_only = {**fixed, "deterministic": False}
        return (
            bind(module, "_flash_attn_varlen_forward", {**_TENSORS, **_LENGTHS, **_OPTIONS}, forward_only),
            bind(
                module,
                "_flash_attn_varlen_backward",
                {**_RESULTS, **_TENSORS, **_GRADS, **_LENGTHS, **_OPTIONS},
                backward_only,
            ),
            bind(module, "_flash_attn_forward", {**_TENSORS, **_OPTIONS}, forward_only),
            bind(module, "_flash_attn_varlen_forward", _RAGGED, forward_only),
        )
