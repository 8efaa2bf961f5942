"""Kernels written in Triton while work is counted: who would be launched on what; nothing is compiled and nothing runs.

Triton launches below torch's dispatcher, so a dispatch mode sees the tensors that a kernel fills, and not the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vlm_pg.bench.paper.operations import spanned_bytes
from vlm_pg.bench.paper.replaced import replaced

# Of each kernel the tensors that it reads and then writes, read off liger-kernel 0.8; others are read or written, once.
READ_AND_WRITTEN = {
    "_triton_rope": ("q_ptr", "k_ptr"),
    "_swiglu_backward_kernel": ("a_ptr", "b_ptr"),
    "_swiglu_backward_kernel_tiled": ("a_ptr", "b_ptr"),
}


@contextmanager
def noted_launches(note: Callable[[str, int], None]) -> Iterator[None]:
    """Inside, Triton's launches call ``note(name of the kernel, bytes read and written)`` instead of a driver.

    A tensor that is given twice (a gradient that is replaced in place) is counted twice.
    """
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:  # then nobody can launch any
        yield
        return

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        note(kernel.fn.__name__, launch_bytes(kernel.fn.__name__, kernel.arg_names, args, kwargs))

    def tuned_launch(tuner: Any, *args: Any, **kwargs: Any) -> None:
        # One of its configurations would run, after trials that only the first call of a run needs.
        kernel = tuner.fn
        while not isinstance(kernel, JITFunction):  # heuristics may stand between
            kernel = kernel.fn
        launch(kernel, *args, **kwargs)

    with replaced(JITFunction, run=launch), replaced(Autotuner, run=tuned_launch):
        yield


def launch_bytes(name: str, parameters: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Read and written by the kernel ``name``, whose arguments are called ``parameters``."""
    named = dict(zip(parameters, args)) | kwargs
    twice = READ_AND_WRITTEN.get(name, ())
    return sum(
        spanned_bytes(value) * (2 if parameter in twice else 1)
        for parameter, value in named.items()
        if isinstance(value, torch.Tensor)
    )
