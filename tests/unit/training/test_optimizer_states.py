"""Optimizer states in files that any layout reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlm_pg.distributed import RankLayout
from vlm_pg.errors import CheckpointError
from vlm_pg.training.optimizer_states import Contents, OptimizerStates, StateSlice, read_states, write_states

# 10 and 3 elements.
SHAPES = {"a.weight": (2, 5), "b": (3,)}


class Divided(OptimizerStates):
    """The elements of all weights in a row, of which rank ``rank`` has every one up to the next rank's first."""

    def __init__(self, ranks: RankLayout, updates: int, masters: bool = True, shapes: dict = SHAPES, piece: int = 99):
        self.shapes, self.masters, self._updates, self._piece = shapes, masters, updates, piece
        self._ranks = ranks
        self.held: dict[tuple[str, str, int], torch.Tensor] = {}

    @property
    def updates(self) -> int:
        return self._updates

    def slices(self) -> Iterator[StateSlice]:
        for weight, kind, first, end in self._ranges(self._updates):
            yield StateSlice(weight, kind, first, value(weight, kind)[first:end])

    def blank(self, updates: int) -> Iterator[StateSlice]:
        for weight, kind, first, end in self._ranges(updates):
            self.held[weight, kind, first] = torch.full((end - first,), torch.nan)
            yield StateSlice(weight, kind, first, self.held[weight, kind, first])

    def _ranges(self, updates: int) -> Iterator[tuple]:
        for weight, shape in self.shapes.items():
            count = torch.Size(shape).numel()
            begin, end = (count * rank // self._ranks.world_size for rank in (self._ranks.rank, self._ranks.rank + 1))
            for first in range(begin, end, self._piece):
                for kind in self.kinds(updates):
                    yield weight, kind, first, min(first + self._piece, end)


def value(weight: str, kind: str) -> torch.Tensor:
    first = 100 * list(SHAPES).index(weight) + 1000 * ("master", "exp_avg", "exp_avg_sq").index(kind)
    return first + torch.arange(float(torch.Size(SHAPES[weight]).numel()))


def write(folder: Path, ranks: int, file_bytes: int = 2**31, **more: object) -> None:
    for rank in range(ranks):
        layout = RankLayout(rank, ranks)
        write_states(folder, Divided(layout, 3, **more), layout, file_bytes)  # type: ignore[arg-type]


def assert_filled(states: Divided) -> None:
    assert states.held
    for (weight, kind, first), found in states.held.items():
        assert torch.equal(found, value(weight, kind)[first : first + found.numel()])


@pytest.mark.parametrize("piece", [1, 4])
@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_every_element_arrives(writers: int, readers: int, piece: int, tmp_path: Path) -> None:
    write(tmp_path, writers, piece=piece)
    for rank in range(readers):
        states = Divided(RankLayout(rank, readers), 0, piece=3)
        assert read_states(tmp_path, states) == 3
    assert_filled(states)


def test_files_are_no_larger_than_requested(tmp_path: Path) -> None:
    write(tmp_path, 2, file_bytes=16, piece=2)
    files = sorted((tmp_path / "optimizer").glob("*.safetensors"))
    assert len(files) > 8 and {file.name[:10] for file in files} == {"rank-00000", "rank-00001"}
    states = Divided(RankLayout(), 0)
    read_states(tmp_path, states)
    assert_filled(states)


def test_before_the_first_update_there_are_masters_alone(tmp_path: Path) -> None:
    write_states(tmp_path, Divided(RankLayout(), 0), RankLayout())
    states = Divided(RankLayout(), 0)
    assert read_states(tmp_path, states) == 0
    assert {kind for _, kind, _ in states.held} == {"master"}


@pytest.mark.parametrize(
    "kind, odd, words",
    [
        ("exp_avg", torch.nan, "nan to nan"),
        ("exp_avg_sq", torch.inf, "2100.0 to inf"),
        ("master", -torch.inf, "-inf to 102.0"),
        ("exp_avg_sq", -1.0, "-1.0 to 2102.0"),
    ],
)
def test_values_that_would_spoil_the_weights_are_refused(kind: str, odd: float, words: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = tmp_path / "optimizer" / "rank-00000-00000.safetensors"
    tensors = load_file(file)
    tensors[f"b/{kind}/0"][1] = odd
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{file.name} has values from {words} in b/{kind}/0, which would make"):
        read_states(tmp_path, Divided(RankLayout(), 0))


def test_slices_that_overlap_are_no_fault(tmp_path: Path) -> None:
    """As where several groups of ranks hold the same."""
    write(tmp_path, 2)
    write_states(tmp_path, Divided(RankLayout(), 3), RankLayout(7, 8))
    states = Divided(RankLayout(1, 3), 0)
    read_states(tmp_path, states)
    assert_filled(states)


@pytest.mark.parametrize(
    "shapes, words",
    [
        (
            {"a.weight": (2, 5)},
            r"states of 2 weights, and 1 weights train; 1 differ\. The first is b: one of shape \[3\]",
        ),
        (SHAPES | {"c": (1,)}, r"and 3 weights train; 1 differ\. The first is c: none there, one of shape \[1\] here"),
        (SHAPES | {"b": (4,)}, r"The first is b: one of shape \[3\] there, one of shape \[4\] here"),
    ],
    ids=str,
)
def test_other_weights_are_refused_by_name(shapes: dict[str, tuple[int, ...]], words: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=words):
        read_states(tmp_path, Divided(RankLayout(), 0, shapes=shapes))


def test_another_dtype_is_refused_and_contents_are_read_without_the_states(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"was written with model\.dtype=bf16, and it is fp32 now"):
        read_states(tmp_path, Divided(RankLayout(), 0, masters=False))
    assert Contents.read(tmp_path) == Contents(updates=3, masters=True, weights=SHAPES)
    with pytest.raises(CheckpointError, match=r"has no optimizer/states\.json"):
        Contents.read(tmp_path / "optimizer")
