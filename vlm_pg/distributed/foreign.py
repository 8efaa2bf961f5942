"""Process groups with another program's processes, beside the run's own: this process sends, as rank 0."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed

# Broadcasts of gloo that may not have ended, and their groups. ``abort()`` does not end them, and freeing a group waits
# for them: at a lost peer until the time-out, in any thread. A reference that is never dropped keeps the set, with the
# groups, from being freed at the exit of the process as well.
_started = set[tuple[Any, Any]]()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_started))


def open_store(address: str, timeout: timedelta) -> Any:
    """A store on a free port of this machine, in which the other processes meet it."""
    return dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def sender_group(store: Any, backend: str, size: int, address: str, timeout: timedelta) -> Any:
    """The sender's end of a group of ``size`` processes; ``backend``: gloo or nccl."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, 0, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, 0, size, options)


def start_broadcast(group: Any, values: torch.Tensor) -> Any:
    """Broadcast ``values`` from rank 0; ``wait()`` of the result returns once the others have them."""
    _forget_ended()
    work = group.broadcast([values], dist.BroadcastOptions())
    if isinstance(group, dist.ProcessGroupGloo):
        _started.add((group, work))
    return work


def end_group(group: Any) -> None:
    """Without waiting for its broadcasts; NCCL's end, gloo's stay until they do."""
    group.abort()
    _forget_ended()


def _forget_ended() -> None:
    for one in tuple(_started):
        if one[1].is_completed():
            _started.discard(one)
