"""A process of its own, for Triton's interpreter: decode steps or prefills on fused kernels, on the CPU, and others.

Arguments: steps of the script, or "prefill", then families. Prints for each family the largest difference of a hidden
state (of a prefill also of keys and values), and how often each kernel was called.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.groups import tiny_policy
from tests.unit.rollout import test_prefill, test_ragged
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.models.policy import Policy
from vlm_pg.models.stream_memory import RowTiles, route_row_wise
from vlm_pg.rollout import prefix_attention
from vlm_pg.rollout.decoding import CohortDecoder
from vlm_pg.rollout.fused.choice import prefill_unchecked
from vlm_pg.rollout.ragged import RaggedDecoder, StepOperators

TILE_ROWS = 5


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


def prefilled(policy: Policy, layers: AbstractContextManager[None] | None = None) -> list[torch.Tensor]:
    """Hidden states, keys and values of one prompt in two passes."""
    case = test_prefill.make_case(policy, "text", 0)
    _, store, hidden = test_prefill.prefilled(policy, [case.prompt], -(-case.prompt.num_tokens // 2), layers)
    return [*hidden, *store.keys.values(), *store.values.values()]


@torch.no_grad()
def main() -> None:
    prefix_attention.pieces_of = in_pieces
    for family in sys.argv[2:]:
        policy = tiny_policy(family=family)
        assert isinstance(policy.kernel, CpuFlashKernel)
        if sys.argv[1] == "prefill":
            expected = prefilled(policy)
            # Streams in tiles of rows stay in tiles.
            route_row_wise(policy.language_model, RowTiles(TILE_ROWS))
            with Called() as called:
                got = prefilled(policy, prefill_unchecked(policy))
        else:
            test_ragged.NUM_STEPS = int(sys.argv[1])
            expected = test_ragged.scripted(policy, CohortDecoder)
            fused: Any = partial(RaggedDecoder, operators=StepOperators.on_cuda(policy))
            with Called() as called:
                got = test_ragged.scripted(policy, fused)
        worst = max(float((one - other).abs().max()) for one, other in zip(expected, got, strict=True))
        print(family, worst, *(f"{name}={count}" for name, count in sorted(called.operators.items())))


if __name__ == "__main__":
    main()
