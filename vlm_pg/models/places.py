"""Where tensors are put that the device need not hold for now: host memory behind a GPU, a file behind host memory.

What is put away comes back with the same values and strides. On a GPU both ways run beside the computation, on streams
of their own, through pinned memory; a file is written and read when it is asked for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import torch

from vlm_pg.errors import ModelError

GIB = 2**30
PAGE_BYTES = 4096
_LEAST_SHARE_BITS = 4  # the smallest piece: a sixteenth of the largest


class Stored(Protocol):
    """One tensor that was put away; what it takes is given back when nobody holds this any more."""

    def fetch(self) -> None:
        """Begin to bring it back, where that can go on beside other work."""
        ...

    def get(self) -> torch.Tensor:
        """It, on the device it came from; every call gives a tensor of its own."""
        ...


class Place(Protocol):
    """Where tensors of one device are put away."""

    def put(self, tensor: torch.Tensor) -> Stored:
        """Put the values of ``tensor`` away, without its graph. Whoever wants to win memory lets go of the tensor."""
        ...

    @property
    def name(self) -> str:
        """For the user."""
        ...


def place_behind(device: torch.device, folder: str | Path | None = None) -> Place:
    """Host memory for a GPU; for the CPU a file in ``folder`` (None: the system's folder for temporary files)."""
    return HostMemory(device) if device.type == "cuda" else FileOnDisk(folder)


class HostMemory:
    """Pinned memory of the host, for tensors of one GPU.

    What is given back is kept here: recording a CUDA graph empties torch's own cache of pinned memory, and pinning anew
    takes longer than a copy.
    """

    name = "pinned host memory"

    def __init__(self, device: torch.device):
        self._device = device
        self.outward = torch.cuda.Stream(device)
        self.homeward = torch.cuda.Stream(device)
        self._free: dict[int, list[tuple[torch.Tensor, Sequence[torch.cuda.Event]]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        return HostMemory(self._device)

    def put(self, tensor: torch.Tensor) -> Stored:
        return _InHostMemory(self, _dense(tensor))

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], to be written to by ``outward``, after what still reads there."""
        free = self._free.get(size)
        if not free:
            return _pinned(size)
        piece, reads = free.pop()
        for read in reads:
            self.outward.wait_event(read)
        return piece

    def give_back(self, pieces: Sequence[torch.Tensor], reads: Sequence[torch.cuda.Event]) -> None:
        for piece in pieces:
            self._free.setdefault(len(piece), []).append((piece, reads))


class _InHostMemory:
    def __init__(self, place: HostMemory, tensor: torch.Tensor):
        self._place, self._device = place, tensor.device
        # Without values: dtype, shape and strides to come back with.
        self._like = torch.empty_like(tensor, device="meta")
        values = _bytes_of(tensor)
        self._pieces = [place.take(size) for size in pinned_pieces(len(values))]
        self._reads: list[torch.cuda.Event] = []
        finalize(self, place.give_back, self._pieces, self._reads)
        place.outward.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(place.outward):
            for piece, part in self._with(values):
                piece.copy_(part, non_blocking=True)
        # Its memory is not given to others before the copy has been made.
        tensor.record_stream(place.outward)
        self._away = place.outward.record_event()
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        if self._coming is not None:
            return
        stream = self._place.homeward
        with torch.cuda.stream(stream):
            stream.wait_event(self._away)
            tensor = torch.empty_like(self._like, device=self._device)
            for piece, part in self._with(_bytes_of(tensor)):
                part.copy_(piece, non_blocking=True)
            arrived = stream.record_event()
        self._reads[:] = [arrived]  # the stream's later event stands for earlier ones
        self._coming = (tensor, arrived)

    def get(self) -> torch.Tensor:
        self.fetch()
        assert self._coming is not None
        (tensor, arrived), self._coming = self._coming, None
        here = torch.cuda.current_stream(self._device)
        here.wait_event(arrived)
        tensor.record_stream(here)
        return tensor

    def _with(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each piece of the host's memory with its part of ``values``."""
        first = 0
        for piece in self._pieces:
            part = values[first : first + len(piece)]
            yield piece[: len(part)], part
            first += len(piece)


def pinned_pieces(size: int) -> list[int]:
    """So many bytes, and at most a sixteenth more, as powers of two.

    torch's allocator of pinned memory gives a power of two to each request: in one piece a tensor could take twice its
    size. And what comes back can be used again, whatever the lengths of later streams.
    """
    least = max(PAGE_BYTES, 1 << max(0, size.bit_length() - 1 - _LEAST_SHARE_BITS))
    units = -(-size // least)
    return [least << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class FileOnDisk:
    """One unnamed file, which is gone with the process; room that was given back is used again.

    Raises:
        ModelError: there is no such folder, or no room in it.
    """

    def __init__(self, folder: str | Path | None = None):
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # lives as long as this
        except OSError as error:
            raise ModelError(
                f"No file can be made in {self._folder} for what memory need not hold ({error}). Set "
                "model.offload_folder to a folder on a disk, or model.offload_layer_inputs=false and "
                "model.offload_prefix_states=false."
            ) from error
        self.size = 0
        self._free: dict[int, list[int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> FileOnDisk:
        return FileOnDisk(self._folder)

    @property
    def name(self) -> str:
        return f"a file in {self._folder}"

    def put(self, tensor: torch.Tensor) -> Stored:
        tensor = _dense(tensor)
        size = tensor.numel() * tensor.element_size()
        free = self._free.get(size)
        offset = free.pop() if free else self.size
        self.size = max(self.size, offset + size)
        stored = _InFile(self, offset, tensor)
        finalize(stored, self._free.setdefault(size, []).append, offset)
        return stored

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        values = _on_host(tensor)
        while len(values):
            try:
                written = os.pwrite(self._file.fileno(), values, offset)
            except OSError as error:
                raise ModelError(
                    f"{error.strerror} in {self._folder}, at {offset / GIB:.1f} GiB of what memory need not hold. Set "
                    "model.offload_folder to a folder with more room, or lower training.micro_batch_tokens."
                ) from error
            values, offset = values[written:], offset + written

    def read(self, tensor: torch.Tensor, offset: int) -> None:
        values = _on_host(tensor)
        while len(values):
            count = os.preadv(self._file.fileno(), [values], offset)
            if not count:
                raise ModelError(f"The file in {self._folder} for what memory need not hold has been cut short.")
            values, offset = values[count:], offset + count


class _InFile:
    def __init__(self, place: FileOnDisk, offset: int, tensor: torch.Tensor):
        self._place, self._offset = place, offset
        # Without values: dtype, shape and strides to come back with.
        self._like = torch.empty_like(tensor, device="meta")
        place.write(tensor, offset)

    def fetch(self) -> None:
        """There is nothing that would go on beside the computation."""

    def get(self) -> torch.Tensor:
        tensor = torch.empty_like(self._like, device="cpu")
        self._place.read(tensor, self._offset)
        return tensor


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its values without gaps and overlaps, in the order of dimensions that it has already where that has none."""
    tensor = tensor.detach()
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, a view of a dense tensor's values in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _on_host(tensor: torch.Tensor) -> memoryview:
    return memoryview(_bytes_of(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs forget that it is one
