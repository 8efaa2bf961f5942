"""A process for Triton's interpreter: the kernel of ``fused/delta_rule`` on the CPU against torch's operators.

Prints the largest relative error of states and outputs over all cases, one line a case.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from vlm_pg.rollout import linear_step
from vlm_pg.rollout.fused.delta_rule import gated_delta_step_

# Rows, heads, sizes of a key and of a value; not all powers of two, nor multiples of the columns of a program.
CASES = [(2, 3, 16, 16), (1, 2, 128, 128), (3, 1, 24, 40), (2, 2, 20, 70)]


def main() -> None:
    torch.manual_seed(0)
    for rows, heads, key_size, value_size in CASES:
        query, key = (torch.randn(rows, heads, key_size).bfloat16() for _ in range(2))
        value = torch.randn(rows, 2 * heads, value_size).bfloat16()[:, :heads]  # a view, as of a split
        log_decay, beta = -torch.rand(rows, heads) * 3, torch.rand(rows, heads)
        state = torch.randn(rows, heads, key_size, value_size)
        after = state.clone()
        expected = linear_step.gated_delta_step_(after, query, key, value, log_decay, beta)
        out = gated_delta_step_(state, query, key, value, log_decay, beta)
        pairs = ((out, expected), (state, after))
        print(max(float((got - right).abs().max() / right.abs().max()) for got, right in pairs))


if __name__ == "__main__":
    main()
