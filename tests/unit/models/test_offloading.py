"""Offloaded tensors come back as they were, and their memory is reused; errors say what to do."""

from __future__ import annotations

import errno
import gc
import os
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_pg.errors import ModelError
from vlm_pg.models import offloading
from vlm_pg.models.offloading import FileOnDisk, HostMemory, OffloadLane, offload_target, pinned_pieces

TENSORS = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(3, 5).bfloat16(),
    "int64": torch.arange(7),
    "transposed": torch.randn(3, 4, 5).transpose(0, 2),
    "with gaps": torch.randn(6, 8)[::2, 1:5],
    "expanded": torch.randn(1, 5).expand(4, 5),
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_get_returns_the_tensor(tensor: torch.Tensor, tmp_path: Path) -> None:
    stored = offload_target(torch.device("cpu"), tmp_path).put(tensor)
    stored.fetch()
    for _ in range(2):
        back = stored.get()
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
        assert back.stride() == torch.empty_like(tensor).stride() and not back.requires_grad
    assert back.data_ptr() != stored.get().data_ptr() or not tensor.numel()


class FakeStream:
    """Copies are made at once; waits are recorded."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    wait_event = wait_stream

    def record_event(self) -> object:
        return object()


@pytest.fixture
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStream, list[object]]:
    """The current stream, and those for which tensors' memory is reserved."""
    here, recorded = FakeStream(), []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    monkeypatch.setattr(offloading, "_pinned", lambda size: torch.full((size,), 77, dtype=torch.uint8))
    return here, recorded


@pytest.mark.parametrize("tensor", [*TENSORS.values(), torch.randn(70_001)], ids=[*TENSORS, "several pieces"])
def test_host_memory_on_fake_streams(tensor: torch.Tensor, fake_streams: tuple[FakeStream, list[object]]) -> None:
    here, recorded = fake_streams
    target: Any = HostMemory(torch.device("cpu"))
    stored: Any = target.put(tensor)
    assert target.offload_stream.waited == [here] and recorded == [target.offload_stream]
    for _ in range(2):
        back = stored.get()
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
        assert back.stride() == torch.empty_like(tensor).stride()
    # The copy home begins after the one away, and is waited for where its result is used.
    assert target.prefetch_stream.waited == 2 * [stored._copied] and len(here.waited) == 2
    assert recorded == [target.offload_stream, here, here]


def test_host_memory_is_written_to_again_behind_what_reads_it(fake_streams: object) -> None:
    target: Any = HostMemory(torch.device("cpu"))
    first: Any = target.put(torch.ones(70_001))
    pieces = [piece.data_ptr() for piece in first._pieces]
    first.get(), first.get()
    last_read = first._reads[0]
    del first
    target.offload_stream.waited.clear()
    second: Any = target.put(torch.zeros(70_000))
    assert [piece.data_ptr() for piece in second._pieces] == pieces and len(pieces) > 1
    assert target.offload_stream.waited[:-1] == len(pieces) * [last_read]
    assert torch.equal(second.get(), torch.zeros(70_000))
    third: Any = target.put(torch.full((70_000,), 3.0))  # the second one is still there
    assert not {piece.data_ptr() for piece in third._pieces} & set(pieces)
    assert torch.equal(second.get(), torch.zeros(70_000)) and torch.equal(third.get(), torch.full((70_000,), 3.0))


def test_pinned_memory_is_little_more_than_what_lies_in_it() -> None:
    """torch rounds each piece up to a power of two, and finds it again by that."""
    for size in [*range(5000), 2**20 - 1, 2**20, 2**20 + 1, 940 * 2**20, 3 * 2**30 + 5, 131_072 * 3584 * 2]:
        pieces = pinned_pieces(size)
        assert all(piece.bit_count() == 1 and piece >= 4096 for piece in pieces) and len(pieces) <= 5
        assert size <= sum(pieces) <= max(size * 17 / 16, -(-size // 4096) * 4096)


def test_room_is_used_again(tmp_path: Path) -> None:
    target = FileOnDisk(tmp_path)
    first = target.put(torch.ones(8))
    for value in range(5):
        passing = target.put(torch.full((8,), float(value)))
        del passing
        gc.collect()
    assert target.size == 2 * 8 * 4
    assert torch.equal(first.get(), torch.ones(8))
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_copy_has_a_file_of_its_own(tmp_path: Path) -> None:
    target = FileOnDisk(tmp_path)
    stored = target.put(torch.ones(4))
    deepcopy(target).put(torch.zeros(4))
    assert torch.equal(stored.get(), torch.ones(4))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No file can be made in .*nowhere.* Set model.offload_folder to a folder on"):
        FileOnDisk(tmp_path / "nowhere")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = FileOnDisk(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        ModelError, match=r"No space left on device in .*Set model.offload_folder to a folder with more"
    ):
        target.put(torch.ones(4))


def test_writes_and_reads_may_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, values, offset: pwrite(file, values[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda file, values, offset: preadv(file, [values[0][:5]], offset))
    tensor = torch.randn(11)
    assert torch.equal(FileOnDisk(tmp_path).put(tensor).get(), tensor)


class _Recorded:
    """A tensor that records its prefetches and reads."""

    def __init__(self, events: list[str], tensor: torch.Tensor):
        self._events, self._tensor = events, tensor

    def fetch(self) -> None:
        self._events.append(f"fetch {int(self._tensor[0])}")

    def get(self) -> torch.Tensor:
        self._events.append(f"get {int(self._tensor[0])}")
        return self._tensor


def test_the_layer_before_is_on_its_way() -> None:
    """A read of layer 2 prefetches its other tensors and those of layer 1, once."""
    events: list[str] = []
    target: Any = SimpleNamespace(put=partial(_Recorded, events))
    lane = OffloadLane(target, least_bytes=8)
    layers = []
    for layer in range(3):
        lane.next_layer()
        layers.append([lane.put(torch.full((4,), 10 * layer + part)) for part in range(2)])
    small = lane.put(torch.tensor([7], dtype=torch.int32))
    layers[2][0].get()
    assert sorted(events[:-1]) == ["fetch 10", "fetch 11", "fetch 21"] and events[-1] == "get 20"
    events.clear()
    layers[2][1].get()
    layers[1][0].get()
    assert "fetch 20" not in events and "fetch 21" not in events
    assert events[-1] == "get 10" and {"fetch 0", "fetch 1", "fetch 11"} <= set(events)
    events.clear()
    assert int(small.get()) == 7 and not events  # too small to be moved
