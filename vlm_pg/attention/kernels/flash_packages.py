"""Kernels of the packages flash-attn (FlashAttention-2), flash_attn_3 and flash-attn-4, bound by argument names.

All of them take cumulative lengths, know grouped-query heads, return the log-sum-exp as fp32 [N, rows], and have a
backward that recomputes probabilities from the output and log-sum-exp it is given, so merged ones may be passed.
Versions name arguments differently; each function's signature is matched once, when its kernel is made.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm_pg.attention.kernels.base import Bounds, FlashKernel, Grads, OutLse
from vlm_pg.attention.tree import SegmentCall

EntryPoints = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]

# Our argument names -> the packages' names.
_TENSORS = {"q": ["q"], "k": ["k"], "v": ["v"]}
_OPTIONS = {"scale": ["softmax_scale"], "causal": ["causal", "is_causal"]}
_LENGTHS = {"cu_q": ["cu_seqlens_q"], "cu_k": ["cu_seqlens_k"], "max_q": ["max_seqlen_q"], "max_k": ["max_seqlen_k"]}
_DENSE = {**_TENSORS, **_OPTIONS}
_SEGMENTS = {**_DENSE, **_LENGTHS}
_RAGGED = {**_SEGMENTS, "used_k": ["seqused_k"]}
_GRADS = {"grad_q": ["dq"], "grad_k": ["dk"], "grad_v": ["dv"]}
_BACKWARD = {**_SEGMENTS, **_GRADS, "grad_out": ["dout"], "out": ["out"], "lse": ["softmax_lse", "lse"]}


class EntryPointError(ImportError):
    """A package is not importable here, or its functions have changed. The message says which and how."""


def import_first(modules: Sequence[str]) -> Any:
    """The first of ``modules`` that imports. Raises EntryPointError: none does; the message has the reason for each."""
    problems = []
    for name in modules:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            # OSError, RuntimeError: a compiled part built for another torch or CUDA.
            first_line = str(error).splitlines()[0] if str(error) else "no message"
            problems.append(f"{name}: {first_line}")
    raise EntryPointError(f"it does not import ({'; '.join(problems)})")


def bind(
    module: Any,
    function_name: str,
    takes: Mapping[str, Sequence[str]],
    fixed: Mapping[str, Any] | None = None,
    absent: Collection[str] = (),
) -> Callable[..., Any]:
    """``module.function_name`` as a function of our own argument names.

    Args:
        takes: our name -> names under which versions of the package know this argument.
        fixed: arguments that always get the same value, passed where the version has them.
        absent: optional tensors that some versions want spelled out as None.

    Raises:
        EntryPointError: the function is not there, lacks one of our arguments, or wants one that we do not know.
    """
    function = getattr(module, function_name, None)
    if function is None:
        raise EntryPointError(f"{module.__name__} has no {function_name}; another version of the package is needed")
    # A function registered as a torch custom operator hides its signature behind (*args, **kwargs).
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    names = {ours: name for ours, known in takes.items() for name in known if name in parameters}
    constants = {name: value for name, value in (fixed or {}).items() if name in parameters}
    constants |= {name: None for name in absent if name in parameters}
    missing = sorted(takes.keys() - names.keys())
    unknown = sorted(
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in constants
        and name not in names.values()
    )
    if missing or unknown:
        raise EntryPointError(
            f"{module.__name__}.{function_name} has another signature than this kernel was written for "
            f"(not found: {', '.join(missing) or 'none'}; not known: {', '.join(unknown) or 'none'}); "
            "install a version named in this kernel's file"
        )

    def call(**ours: Any) -> Any:
        return function(**{names[name]: value for name, value in ours.items()}, **constants)

    return call


class FlashPackageKernel(FlashKernel):
    """A kernel from an installed package.

    ``majors`` are the major compute capabilities its forward and backward support. Entry points are looked up once;
    a package that does not import, or whose functions have changed, makes the kernel unavailable with that reason.
    """

    majors: ClassVar[tuple[int, ...]]

    def __init__(self) -> None:
        self._forward, self._backward, self._dense, self._ragged = self.entry_points()

    @classmethod
    @abstractmethod
    def entry_points(cls) -> EntryPoints:
        """Functions for segments_forward, segments_backward, dense_forward and ragged_forward, by our argument names.

        Raises:
            EntryPointError: the package is not importable or not one that this kernel knows.
        """

    @classmethod
    def unsupported_on(cls, capability: tuple[int, int]) -> str | None:
        if capability[0] in cls.majors:
            return _entry_point_fault(cls)
        majors = ", ".join(f"{major}.x" for major in cls.majors)
        return f"it runs on compute capability {majors}, this GPU has {capability[0]}.x"

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool, used_k: Tensor | None = None
    ) -> OutLse:
        run, used = (self._forward, {}) if used_k is None else (self._ragged, {"used_k": used_k})
        out, lse, *_ = run(q=q, k=k, v=v, **_named(bounds), **used, scale=scale, causal=causal)
        return out, lse

    def segments_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: SegmentCall, scale: float
    ) -> Grads:
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        lse = lse.contiguous()  # read by pointer, whatever its strides
        results = {"grad_out": grad, "out": out, "lse": lse, "grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
        bounds = _named(self.bounds(q, call))
        self._backward(q=q, k=k, v=v, **results, **bounds, scale=scale, causal=call.causal)
        return grad_q, grad_k, grad_v

    def dense_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> OutLse:
        self.check_head_dim(q)
        out, lse, *_ = self._dense(q=q, k=k, v=v, scale=scale, causal=False)
        return out, lse


def _named(bounds: Bounds) -> dict[str, Any]:
    return dict(zip(_LENGTHS, bounds, strict=True))


@functools.cache
def _entry_point_fault(kernel: type[FlashPackageKernel]) -> str | None:
    try:
        kernel.entry_points()
    except EntryPointError as error:
        return str(error)
    return None


class Flash2Kernel(FlashPackageKernel):
    """FlashAttention-2 from ``flash-attn`` (read at 2.8.3): as torch has it, for comparisons and other torches."""

    name = "flash-attn-2"
    majors = (8, 9, 10, 11, 12)
    least_max_query = 2

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(["flash_attn.flash_attn_interface"])
        fixed: dict[str, Any] = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
        fixed |= {"window_size_left": -1, "window_size_right": -1}
        forward_only = {**fixed, "return_softmax": False}
        # Not deterministic: dq is summed with atomic adds, as in torch's own flash backward.
        backward_only = {**fixed, "deterministic": False}
        return (
            bind(module, "_flash_attn_varlen_forward", _SEGMENTS, forward_only),
            bind(module, "_flash_attn_varlen_backward", _BACKWARD, backward_only),
            bind(module, "_flash_attn_forward", _DENSE, forward_only),
            bind(module, "_flash_attn_varlen_forward", _RAGGED, forward_only),
        )


class Flash3Kernel(FlashPackageKernel):
    """FlashAttention-3 (``flash_attn_3``, from the repository's ``hopper`` folder): the fastest choice on Hopper.

    Versions differ: the interface lies on its own or inside the package, optional tensors have defaults or not, and the
    backward's flag is ``causal`` or ``is_causal``.
    """

    name = "flash-attn-3"
    majors = (9,)

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(("flash_attn_interface", "flash_attn_3.flash_attn_interface"))
        # Key-value caches, paging, rotary embedding and fp8 scales: not used here.
        unused = {"seqused_q", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"}
        unused |= {"k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "q_descale", "k_descale", "v_descale"}
        unused_backward = ("sequed_q", "sequed_k", "seqused_q", "seqused_k")
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return (
            bind(module, "_flash_attn_forward", _SEGMENTS, absent=unused | {"seqused_k"}),
            bind(module, "_flash_attn_backward", _BACKWARD, absent=unused_backward),
            bind(module, "_flash_attn_forward", _DENSE, absent=unused.union(("seqused_k",), lengths)),
            bind(module, "_flash_attn_forward", _RAGGED, absent=unused),
        )


class Flash4Kernel(FlashPackageKernel):
    """FlashAttention-4 (``flash-attn-4``, module ``flash_attn.cute``; read at 4.0.0b36), Hopper and Blackwell.

    Kernels are compiled when a head dim, a dtype and a kind of call first occur, so the self-check at start takes
    longer. The backward starts at capability 9.0.
    """

    name = "flash-attn-4"
    by_name_only = True  # every release so far is a beta
    majors = (9, 10, 11, 12)

    @classmethod
    def entry_points(cls) -> EntryPoints:
        module = import_first(["flash_attn.cute.interface"])
        # The log-sum-exp is only computed on request where no input requires a gradient, as inside our function.
        with_lse = {"return_lse": True}
        return (
            bind(module, "_flash_attn_fwd", _SEGMENTS, with_lse),
            bind(module, "_flash_attn_bwd", _BACKWARD),
            bind(module, "_flash_attn_fwd", _DENSE, with_lse),
            bind(module, "_flash_attn_fwd", _RAGGED, with_lse),
        )
