"""Weights sent to vLLM over a process group with its workers, whose side is ``vllm_plugin/vlm_pg_transfer.py``."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from vlm_pg.distributed.foreign import end_group, open_store, sender_group, start_broadcast
from vlm_pg.errors import ServerError
from vlm_pg.rollout.server.client import ServerClient, gather_or_cancel

# Requests in flight end with the tokens they have, and further ones wait. With mode=keep, vLLM 0.32 would encode the
# media of those in flight anew, whose pixels it has dropped.
PAUSE = "/pause?mode=abort"
# Of one broadcast; a larger tensor makes one alone.
BUCKET_BYTES = 2**28
# As in vlm_pg_transfer.
ALIGNMENT = 16
POLL_SECONDS = 0.01

ForEachServer = Callable[[Sequence[str], Callable[[ServerClient], Awaitable[Any]]], Any]


class Broadcast:
    """One transfer to servers, each with a process group of its own that ends with the transfer.

    Neither side's default process group is used. Tensors are copied into a bucket, which the sender holds beside its
    weights.

    Args:
        urls: of the servers.
        for_each: runs a coroutine for the clients of these servers concurrently.
        loading: version that the servers have from the beginning of the transfer on.
        commit: awaited for every server that has received everything.
        device: of the weights. On a GPU the groups use NCCL, else gloo.
        timeout_seconds: of connecting and of each broadcast.
        pauses: pause the servers first; the caller resumes them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        for_each: ForEachServer,
        loading: str,
        commit: Callable[[ServerClient], Awaitable[None]],
        device: torch.device,
        timeout_seconds: float,
        pauses: bool = False,
    ):
        self._pauses = pauses
        self._urls, self._for_each, self._loading, self._commit = urls, for_each, loading, commit
        self._device, self._timeout_seconds = device, timeout_seconds
        self._key, self._groups = secrets.token_hex(8), dict[str, Any]()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._filled, self._listed = 0, list[tuple[str, str, list[int]]]()

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], is_sender: bool) -> Exception | None:
        """Why the transfer failed, on the sender.

        Gathering is a collective of all ranks, so ``tensors`` is exhausted on each, also after a failure.
        """
        problem = self._attempt(lambda: self._for_each(self._urls, self._open)) if is_sender else None
        for name, tensor in tensors:
            if is_sender and problem is None:
                problem = self._attempt(lambda: self._add(name, tensor))  # noqa: B023
        if is_sender and problem is None:
            problem = self._attempt(self._finish)
        for group in self._groups.values():
            end_group(group)
        self._groups.clear()
        return problem

    @staticmethod
    def _attempt(work: Callable[[], None]) -> Exception | None:
        try:
            work()
        except (ServerError, InterruptedError) as error:
            return error
        return None

    async def _open(self, client: ServerClient) -> None:
        """Begin an update on one server, with a process group of this process (rank 0) and its workers."""
        if self._pauses:
            await client.control(PAUSE, {})
        await client.control("/update_weight_version", {"new_version": self._loading})
        try:
            await self._start(client)
            await self._join(client)
        except (ServerError, OSError, RuntimeError) as error:
            raise ServerError(
                f"It did not join a process group with the trainer: {error} It must be started with "
                "--worker-extension-cls and --weight-transfer-config (docs/servers.md, Broadcast), and reach the "
                "trainer's ports."
            ) from error

    async def _start(self, client: ServerClient) -> None:
        try:
            await client.control("/start_weight_update", {}, once=True)
        except ServerError:  # an earlier update was left unfinished
            with suppress(ServerError):
                await client.control("/finish_weight_update", {}, once=True)
            await client.control("/start_weight_update", {}, once=True)

    async def _join(self, client: ServerClient) -> None:
        size = 1 + int((await client.control("/get_world_size", once=True)).get("world_size", 1))
        timeout = timedelta(seconds=self._timeout_seconds)
        address = await asyncio.to_thread(self._address_seen_from, client.url)
        store = open_store(address, timeout)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        info = {"address": address, "port": store.port, "key": self._key, "backend": backend, "world_size": size}
        info["timeout_seconds"] = self._timeout_seconds
        request = asyncio.ensure_future(client.control("/init_weight_transfer_engine", {"init_info": info}, once=True))
        try:
            workers = [f"present/{rank}" for rank in range(1, size)]
            while not (request.done() or store.check(workers)):
                await asyncio.sleep(POLL_SECONDS)
            if not request.done():
                self._groups[client.url] = await asyncio.to_thread(sender_group, store, backend, size, address, timeout)
            await request
        finally:
            request.cancel()

    def _address_seen_from(self, url: str) -> str:
        """Of this machine, on the route to the server."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), self._timeout_seconds) as connection:
            return str(connection.getsockname()[0])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = -(-data.numel() // ALIGNMENT) * ALIGNMENT
        if self._filled + size > BUCKET_BYTES:
            self._flush()
        if self._filled + size > len(self._buffer):
            self._buffer = torch.empty(max(size, BUCKET_BYTES), dtype=torch.uint8, device=self._device)
        self._buffer[self._filled : self._filled + data.numel()] = data
        self._filled += size
        self._listed.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))

    def _flush(self) -> None:
        if self._listed:
            self._for_each(self._urls, self._send_bucket)
        self._filled, self._listed = 0, []

    async def _send_bucket(self, client: ServerClient) -> None:
        names, dtypes, shapes = zip(*self._listed, strict=True)
        info = {"key": self._key, "names": names, "dtypes": dtypes, "shapes": shapes}
        request = client.control("/update_weights", {"update_info": info}, once=True)
        group, bucket = self._groups[client.url], self._buffer[: self._filled]
        try:
            # In a thread: NCCL connects in the first broadcast, for which the worker needs the request.
            sent = asyncio.to_thread(start_broadcast, group, bucket)
            _, work = await gather_or_cancel([request, sent])
            work.wait()  # the worker has it
        except RuntimeError as error:
            raise ServerError(f"The broadcast broke off: {error}") from error

    def _finish(self) -> None:
        self._flush()
        self._for_each(self._urls, self._end)

    async def _end(self, client: ServerClient) -> None:
        await client.control("/finish_weight_update", {}, once=True)
        await self._commit(client)
