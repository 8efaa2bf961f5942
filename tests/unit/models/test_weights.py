"""Weights with NaN are found on disk too, where DeepSpeed's swapper has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_pg.models.weights import not_finite

NAN = float("nan")


class OneBuffer:
    """As DeepSpeed's swapper of weights, with a single buffer and no disk."""

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.read: list[str] = []
        self.free = 1

    def swap_in(self, weights: list[Any], async_op: bool) -> None:
        (weight,) = weights
        assert self.free == 1 and not async_op
        self.free, weight.ds_tensor.data = 0, self.parts[weight.ds_id]
        self.read.append(weight.ds_id)

    def remove_partition_and_release_buffers(self, weights: list[Any]) -> None:
        (weight,) = weights
        self.free, weight.ds_tensor.data = 1, torch.zeros(1)

    def weight(self, name: str, part: list[float], elements: int) -> Any:
        weight: Any = torch.nn.Parameter(torch.empty(0))
        weight.ds_id, weight.ds_numel, weight.nvme_swapper = name, elements, self
        weight.ds_tensor = torch.zeros(1)
        weight.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")
        self.parts[name] = torch.tensor(part)
        return weight


@pytest.mark.parametrize(
    ("part", "elements", "found"),
    [([1.0, 2.0], 2, []), ([1.0, NAN], 2, ["a"]), ([NAN, 1.0], 2, ["a"]), ([1.0, NAN], 1, [])],
    ids=["finite", "last", "first", "padding"],
)
def test_each_weight_on_disk_is_read_once_through_one_buffer(
    part: list[float], elements: int, found: list[str]
) -> None:
    disk = OneBuffer()
    weights = {"a": disk.weight("a", part, elements), "b": disk.weight("b", [3.0], 1), "held": torch.tensor([NAN])}
    assert not_finite(weights.items()) == [*found, "held"]
    assert disk.read == ["a", "b"] and disk.free == 1
