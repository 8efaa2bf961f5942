"""Children that are forked can go back, whatever fake tensors this process has seen first."""

from __future__ import annotations

import pytest
import torch

from vlm_pg.bench.paper.children import in_children
from vlm_pg.bench.paper.counter import fake_mode


def gradient(factor: float) -> float:
    x = torch.ones((), requires_grad=True)
    (factor * x).backward()
    assert x.grad is not None
    return x.grad.item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU autograd has threads, and no child can")
def test_behind_a_backward_of_fake_tensors() -> None:
    with fake_mode():
        torch.ones(2, requires_grad=True).sum().backward()
    assert list(in_children(gradient, [3.0], 1)) == [(3.0, 3.0)]
