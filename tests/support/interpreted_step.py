"""A process of its own, for Triton's interpreter: whole decode steps on fused kernels, on the CPU, against cohorts.

Arguments: steps of the script, then families. Prints for each family the largest difference of a hidden state, and how
often the steps have called each kernel.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.groups import tiny_policy
from tests.unit.rollout import test_ragged
from vlm_pg.attention.kernels.cpu import CpuFlashKernel
from vlm_pg.rollout import prefix_levels
from vlm_pg.rollout.decoders import CohortDecoder
from vlm_pg.rollout.ragged import RaggedDecoder, StepOperators


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("vlm_pg::"):
            self.operators[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def in_pieces(tokens: dict[int, int], *_: Any) -> dict[int, int]:
    """Every second node in three; the others are read whole."""
    return {node: min(count, 3 if node % 2 else 1) for node, count in tokens.items()}


@torch.no_grad()
def main() -> None:
    test_ragged.NUM_STEPS = int(sys.argv[1])
    prefix_levels.pieces_of = in_pieces
    for family in sys.argv[2:]:
        policy = tiny_policy(family=family)
        assert isinstance(policy.kernel, CpuFlashKernel)
        expected = test_ragged.scripted(policy, CohortDecoder)
        fused: Any = partial(RaggedDecoder, operators=StepOperators.on_cuda(policy))
        with Called() as called:
            got = test_ragged.scripted(policy, fused)
        worst = max(float((one - other).abs().max()) for one, other in zip(expected, got, strict=True))
        print(family, worst, *(f"{name}={count}" for name, count in sorted(called.operators.items())))


if __name__ == "__main__":
    main()
