"""Offloading tensors the device need not hold for now: a GPU's into pinned host memory, a CPU's into a file.

An offloaded tensor comes back with the same values and strides. On a GPU copies both ways overlap the computation, on
streams of their own; a file is read and written synchronously.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from vlm_pg.errors import ModelError
from vlm_pg.memory import GIB

PAGE_BYTES = 4096
_LEAST_SHARE_BITS = 4  # the smallest piece: a sixteenth of the largest


class HostMemory:
    """Pinned memory of the host, for tensors of one GPU.

    Freed buffers are reused: recording a CUDA graph empties torch's own cache of pinned memory, and pinning anew takes
    longer than a copy.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.offload_stream = torch.cuda.Stream(device)
        self.prefetch_stream = torch.cuda.Stream(device)
        self._free: dict[int, list[tuple[Tensor, Sequence[torch.cuda.Event]]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        return HostMemory(self._device)

    def put(self, tensor: Tensor) -> HostTensor:
        """Copy the values of ``tensor``, without its graph. The caller frees the tensor itself."""
        return HostTensor(self, _dense(tensor))

    def take(self, size: int) -> Tensor:
        """uint8 [size], to be written by ``offload_stream``, after pending reads of it."""
        free = self._free.get(size)
        if not free:
            return _pinned(size)
        piece, reads = free.pop()
        for read in reads:
            self.offload_stream.wait_event(read)
        return piece

    def release(self, pieces: Sequence[Tensor], reads: Sequence[torch.cuda.Event]) -> None:
        for piece in pieces:
            self._free.setdefault(len(piece), []).append((piece, reads))


class HostTensor:
    """A tensor in pinned memory, which is freed when this object is collected."""

    def __init__(self, target: HostMemory, tensor: Tensor):
        self._target, self._device = target, tensor.device
        # dtype, shape and strides, without values.
        self._like = torch.empty_like(tensor, device="meta")
        values = _bytes_of(tensor)
        self._pieces = [target.take(size) for size in pinned_pieces(len(values))]
        self._reads: list[torch.cuda.Event] = []
        finalize(self, target.release, self._pieces, self._reads)
        target.offload_stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(target.offload_stream):
            for piece, part in self._with(values):
                piece.copy_(part, non_blocking=True)
        # Its memory is not reused before the copy is done.
        tensor.record_stream(target.offload_stream)
        self._copied = target.offload_stream.record_event()
        self._prefetched: tuple[Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        """Begin to copy it back, beside other work."""
        if self._prefetched is not None:
            return
        stream = self._target.prefetch_stream
        with torch.cuda.stream(stream):
            stream.wait_event(self._copied)
            tensor = torch.empty_like(self._like, device=self._device)
            for piece, part in self._with(_bytes_of(tensor)):
                part.copy_(piece, non_blocking=True)
            arrived = stream.record_event()
        self._reads[:] = [arrived]  # the stream's later event stands for earlier ones
        self._prefetched = (tensor, arrived)

    def get(self) -> Tensor:
        """The tensor, on its device; every call returns a new one."""
        self.fetch()
        assert self._prefetched is not None
        (tensor, arrived), self._prefetched = self._prefetched, None
        here = torch.cuda.current_stream(self._device)
        here.wait_event(arrived)
        tensor.record_stream(here)
        return tensor

    def _with(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each host buffer with its part of ``values``."""
        first = 0
        for piece in self._pieces:
            part = values[first : first + len(piece)]
            yield piece[: len(part)], part
            first += len(piece)


def pinned_pieces(size: int) -> list[int]:
    """So many bytes, and at most a sixteenth more, as powers of two.

    torch's allocator of pinned memory gives a power of two to each request: in one piece a tensor could take twice its
    size. And released buffers fit later streams of any length.
    """
    least = max(PAGE_BYTES, 1 << max(0, size.bit_length() - 1 - _LEAST_SHARE_BITS))
    units = -(-size // least)
    return [least << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class FileOnDisk:
    """One unnamed file, deleted with the process; released room is reused.

    Raises:
        ModelError: there is no such folder, or no room in it.
    """

    def __init__(self, folder: str | Path | None = None):
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # lives as long as this
        except OSError as error:
            raise ModelError(
                f"No file can be made in {self._folder} for offloaded tensors ({error}). Set "
                "model.offload_folder to a folder on a disk, or model.offload_layer_inputs=false and "
                "model.offload_prefix_states=false."
            ) from error
        self.size = 0
        self._free: dict[int, list[int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> FileOnDisk:
        return FileOnDisk(self._folder)

    def put(self, tensor: Tensor) -> FileTensor:
        """As ``HostMemory.put``."""
        tensor = _dense(tensor)
        size = tensor.numel() * tensor.element_size()
        free = self._free.get(size)
        offset = free.pop() if free else self.size
        self.size = max(self.size, offset + size)
        stored = FileTensor(self, offset, tensor)
        finalize(stored, self._free.setdefault(size, []).append, offset)
        return stored

    def write(self, tensor: Tensor, offset: int) -> None:
        values = _on_host(tensor)
        while len(values):
            try:
                written = os.pwrite(self._file.fileno(), values, offset)
            except OSError as error:
                raise ModelError(
                    f"{error.strerror} in {self._folder}, at {offset / GIB:.1f} GiB of offloaded tensors. Set "
                    "model.offload_folder to a folder with more room, or lower training.micro_batch_tokens."
                ) from error
            values, offset = values[written:], offset + written

    def read(self, tensor: Tensor, offset: int) -> None:
        values = _on_host(tensor)
        while len(values):
            count = os.preadv(self._file.fileno(), [values], offset)
            if not count:
                raise ModelError(f"The file of offloaded tensors in {self._folder} has been cut short.")
            values, offset = values[count:], offset + count


class FileTensor:
    """As ``HostTensor``, in a file."""

    def __init__(self, target: FileOnDisk, offset: int, tensor: Tensor):
        self._target, self._offset = target, offset
        # dtype, shape and strides, without values.
        self._like = torch.empty_like(tensor, device="meta")
        target.write(tensor, offset)

    def fetch(self) -> None:
        """Files are read synchronously in ``get``."""

    def get(self) -> Tensor:
        tensor = torch.empty_like(self._like, device="cpu")
        self._target.read(tensor, self._offset)
        return tensor


OffloadTarget = HostMemory | FileOnDisk
Offloaded = HostTensor | FileTensor


def offload_target(device: torch.device, folder: str | Path | None = None) -> OffloadTarget:
    """Host memory for a GPU; for the CPU a file in ``folder`` (None: the system's folder for temporary files)."""
    return HostMemory(device) if device.type == "cuda" else FileOnDisk(folder)


def _dense(tensor: Tensor) -> Tensor:
    """Its values without gaps and overlaps, in the order of dimensions that it has already where that has none."""
    tensor = tensor.detach()
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8, a view of a dense tensor's values in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _on_host(tensor: Tensor) -> memoryview:
    return memoryview(_bytes_of(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs forget that it is one


class OffloadLane:
    """One pass's tensors in ``target``, layer by layer; those below ``least_bytes`` stay on the device.

    Backward goes through the layers in reverse: when a tensor of a layer is read, the others of that layer and of the
    one before it are prefetched.
    """

    def __init__(self, target: OffloadTarget, least_bytes: int):
        self._target = target
        self._least_bytes = least_bytes
        self._waiting: list[WeakSet[LaneTensor]] = [WeakSet()]

    def next_layer(self) -> None:
        """Tensors put from now on belong to the layer that begins."""
        self._waiting.append(WeakSet())

    def put(self, tensor: Tensor) -> LaneTensor:
        """``tensor`` without its graph, offloaded if it is large enough."""
        if tensor.numel() * tensor.element_size() < self._least_bytes:
            return LaneTensor(tensor.detach(), self, 0)
        offloaded = LaneTensor(self._target.put(tensor), self, len(self._waiting) - 1)
        self._waiting[-1].add(offloaded)
        return offloaded

    def prefetch_neighbours(self, tensor: LaneTensor, layer: int) -> None:
        """``tensor`` of ``layer`` is read: prefetch the others of its layer and of the one before."""
        self._waiting[layer].discard(tensor)
        for other in [other for near in self._waiting[max(0, layer - 1) : layer + 1] for other in near]:
            if not isinstance(other.stored, torch.Tensor):
                other.stored.fetch()


class LaneTensor:
    """One tensor of a lane: as it is, or offloaded."""

    def __init__(self, stored: Tensor | Offloaded, lane: OffloadLane, layer: int):
        self.stored, self._lane, self._layer = stored, lane, layer

    def get(self) -> Tensor:
        """Its values, on their device."""
        if isinstance(self.stored, Tensor):
            return self.stored
        self._lane.prefetch_neighbours(self, self._layer)
        return self.stored.get()
