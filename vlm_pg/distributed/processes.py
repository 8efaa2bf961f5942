"""The processes that a launcher started: connecting, notes in their store, leaving, errors caused by other ranks."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vlm_pg.errors import ConfigError

_OF_COLLECTIVES = re.compile(r"gloo|nccl|Connection closed by peer|Connection reset by peer|Broken pipe", re.IGNORECASE)

# A rank may wait in a collective for one that still samples, scores answers or writes a checkpoint. torch's limits (10
# minutes for NCCL, 30 for gloo) would end such a run; dead ranks are detected by ``vlm_pg.watch``. The limit is for
# hangs of all ranks: of a network, or of collectives that do not match.
COLLECTIVE_TIMEOUT = timedelta(hours=6)

# Set by a launcher for each process.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def launched_world_size() -> int:
    """Processes the launcher started, known before they are connected."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_ranks() -> None:
    """Join the processes that the launcher started, if several: NCCL with GPUs, gloo without.

    Raises:
        ConfigError: variables of the launcher are missing, or another process left meanwhile.
    """
    if launched_world_size() == 1 or is_distributed():
        return
    if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {launched_world_size()}, but {', '.join(missing)} is not set, so this process cannot find "
            f"the others. Start it with torchrun or deepspeed, or set {', '.join(LAUNCHER_VARIABLES)}."
        )
    local_device()  # NCCL takes the current one
    store, rank, world_size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # A restart by torchrun keeps the store: entries of the ranks before must not be found. On several nodes the
        # counts may differ, because a node that restarts due to another one does not count.
        store = dist.distributed_c10d.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except RuntimeError as error:
        if not is_about_other_ranks(error):
            raise
        raise ConfigError(
            f"Rank {rank} was left by another one while the {world_size} processes of this run met. Start all of them "
            "again; what the other printed itself says why."
        ) from error
    # Until here, torch's limit applies.
    groups: Any = dist.distributed_c10d
    set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else groups._set_pg_timeout  # torch 2.11
    set_timeout(COLLECTIVE_TIMEOUT)
    # A group's first collective waits at the store for NCCL's id of it.
    store.set_timeout(COLLECTIVE_TIMEOUT)
    # A new group takes torch's default, not the first group's limit, and DeepSpeed makes its own without any.
    groups.default_pg_timeout = groups.default_pg_nccl_timeout = COLLECTIVE_TIMEOUT


def local_device() -> torch.device:
    """The accelerator of this process, or the CPU. Raises ConfigError: more processes than GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= devices:
        raise ConfigError(
            f"LOCAL_RANK is {rank}, and {devices} GPU(s) can be seen here (0 to {devices - 1}). Start one process for "
            f"each (NPROC_PER_NODE={devices}), or let it see more of them (CUDA_VISIBLE_DEVICES)."
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


@cache
def host_group() -> Any:
    """All ranks, on the host: a collective on devices would wait for their queued work."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def is_about_other_ranks(error: BaseException) -> bool:
    """Whether ``error``, or a cause of it, is the message of a collective whose peer is gone (possibly: libraries have
    the same messages for own faults)."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError) or (
            isinstance(chain, RuntimeError) and _OF_COLLECTIVES.search(str(chain))
        ):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def barrier() -> None:
    if is_distributed():
        # NCCL's is a collective on a device; by default the first one uses device rank modulo devices.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def disconnect() -> None:
    """Leave together: others may still be in a collective with this rank."""
    if is_distributed():
        barrier()
        host_group.cache_clear()
        dist.destroy_process_group()


def end_rank(code: int) -> NoReturn:
    """End a connected process without finalizing its interpreter.

    DeepSpeed keeps destroyed groups, whose gloo threads live on. One that releases a Python tensor during finalization
    aborts the process after all its work is done (pytorch/pytorch issue 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class SharedNote:
    """A text in the ranks' store: written by one rank, read by all without a collective, from any thread."""

    def __init__(self, name: str):
        self._key = f"vlm_pg/{name}"
        self._store = dist.distributed_c10d._get_default_store()  # torch has no public name for it

    def write(self, text: str) -> None:
        """Raises ConnectionError: the process that holds the store is gone."""
        try:
            self._store.set(self._key, text)
        except dist.DistError as error:
            raise ConnectionError(f"{self._key} cannot be written: {error}") from error

    def exists(self) -> bool:
        return bool(self._store.check([self._key]))

    def read(self, within_seconds: float) -> str:
        """Waits until it is written. Raises TimeoutError: it was not, or the process that holds the store is gone."""
        try:
            self._store.wait([self._key], timedelta(seconds=within_seconds))
            return self._store.get(self._key).decode()
        except dist.DistError as error:
            raise TimeoutError(f"{self._key} was not written in {within_seconds:.0f} s") from error


class Meeting:
    """A barrier of independent ranks without time-out: collectives give up after minutes. All ranks make their meetings
    in the same order."""

    POLL_SECONDS = 0.1
    _number = 0

    def __init__(self) -> None:
        Meeting._number += 1
        self._key = f"vlm_pg/meeting/{Meeting._number}"

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Until all ranks wait here.

        Raises:
            InterruptedError: ``should_stop``, polled several times a second, returned True.
        """
        if not is_distributed():
            return
        store = dist.distributed_c10d._get_default_store()
        store.add(self._key, 1)
        while store.add(self._key, 0) < dist.get_world_size():
            if should_stop():
                raise InterruptedError("stopped while waiting for the other ranks")
            time.sleep(self.POLL_SECONDS)
