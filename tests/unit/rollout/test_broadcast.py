"""Weights by broadcast: the server has exactly the trainer's tensors, or the version of no complete transfer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.odd_server import Reply
from tests.support.processes import ROOT, ModuleProcess
from tests.support.server_engines import reported
from tests.support.tiny_server import WeightServer
from tests.support.vllm_engine import Worker
from tests.unit.rollout.test_server_weights import RESET, TINY, Run
from tests.unit.rollout.test_server_weights import server as server
from tests.unit.rollout.test_server_weights import short_pauses as short_pauses
from vlm_pg.distributed.foreign import open_store, sender_group
from vlm_pg.errors import ServerError
from vlm_pg.models.settings import LoraSettings
from vlm_pg.rollout.server import broadcast
from vlm_pg.rollout.server.broadcast import Broadcast
from vlm_pg.rollout.server.client import ServerClient, gather_or_cancel
from vlm_pg.rollout.server.engine import PROBE_DIVERGENCE
from vlm_pg.rollout.server.weights import LOADING_ATTEMPTS, Version
from vlm_pg.rollout.settings import ServerSettings

UPDATE = "/update_weights"
STEPS_OF_TRANSFER = [
    "/update_weight_version",
    "/start_weight_update",
    "/get_world_size",
    "/init_weight_transfer_engine",
    UPDATE,
    "/finish_weight_update",
    RESET[-1],
]
Tensors = dict[str, torch.Tensor]


def for_each(urls: Sequence[str], work: Callable[[ServerClient], Awaitable[Any]], seconds: float = 20.0) -> list[Any]:
    async def run(url: str) -> Any:
        settings = ServerSettings(url=url, timeout_seconds=seconds, wait_seconds=0.0, retries=0)
        async with ServerClient(settings, print, print) as client:
            return await work(client)

    async def all_of_them() -> list[Any]:
        return await gather_or_cancel(map(run, urls))

    return asyncio.run(all_of_them())


def transfer(urls: Sequence[str], tensors: Tensors, seconds: float = 20.0) -> tuple[Exception | None, list[str]]:
    """Why it failed, and the names that were taken."""
    taken: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            taken.append(name)
            # As a gathered weight: whole until the next is taken.
            whole = tensor.clone()
            yield name, whole
            whole.zero_()

    async def commit(client: ServerClient) -> None:
        pass

    sender = Broadcast(urls, partial(for_each, seconds=seconds), "loading", commit, torch.device("cpu"), seconds)
    return sender.send(source(), is_sender=True), taken


@pytest.fixture
def receivers() -> Iterator[list[ModuleProcess]]:
    processes = [ModuleProcess("tests.support.receiver") for _ in range(2)]
    yield processes
    for process in processes:
        process.signal(signal.SIGCONT)
        process.kill()


def url_of(process: ModuleProcess) -> str:
    while not process.printed.endswith("/v1\n"):
        assert process.returncode is None, process.printed
        time.sleep(0.05)
    return process.printed.split()[-1]


@pytest.mark.parametrize("bucket_bytes", [2**28, 256])
def test_two_other_processes_have_the_same_tensors(
    receivers: list[ModuleProcess], bucket_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several dtypes and odd sizes, in one bucket or many, of which a large tensor has one of its own. Twice."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", bucket_bytes)
    urls = [url_of(process) for process in receivers]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "lm_head.weight": torch.randn(7, 3, generator=generator).bfloat16(),
            "scale": torch.randn((), generator=generator),
            "large": torch.randn(33, 5, generator=generator),
            "transposed": torch.randn(4, 6, generator=generator).T,
            "half": torch.randn(5, generator=generator).half(),
            "counts": torch.arange(9),
        }
        problem, taken = transfer(urls, tensors)
        assert problem is None and taken == list(tensors)
        for number, url in enumerate(urls):
            file = tmp_path / f"{seed}-{number}.safetensors"
            for_each([url], lambda client: client.control("/save", {"file": str(file)}))  # noqa: B023
            found = load_file(file)
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
            with safe_open(file, "pt") as opened:
                assert opened.metadata()["buckets"] == ("1" if bucket_bytes > 256 else "3")


@pytest.mark.parametrize("death", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_is_lost_in_a_transfer_ends_it_in_time(
    receivers: list[ModuleProcess], death: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors are taken, since other ranks gather them too; the other server takes part in the next transfer."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**20)
    lost, other = receivers
    urls = [url_of(process) for process in receivers]
    tensors = {str(number): torch.ones(2**18) for number in range(8)}
    send = Broadcast._send_bucket

    async def until_lost(self: Broadcast, client: ServerClient) -> None:
        if self._listed[0][0] == "3":
            lost.signal(death)
        await send(self, client)

    monkeypatch.setattr(Broadcast, "_send_bucket", until_lost)
    problem, taken = transfer(urls, tensors, seconds=5.0)
    assert isinstance(problem, ServerError) and urls[0] in str(problem)
    assert taken == list(tensors)
    lost.signal(signal.SIGCONT)
    monkeypatch.setattr(Broadcast, "_send_bucket", send)
    # What it was asked before may still come in between; a run sends three times as well.
    for _ in range(LOADING_ATTEMPTS):
        problem, _ = transfer(urls if death == signal.SIGSTOP else urls[1:], tensors)
        if problem is None:
            break
    assert problem is None and other.returncode is None


def test_a_broadcast_that_nobody_takes_part_in_is_left_behind() -> None:
    """Freeing its group, and the exit of its process, do not wait for its time-out of an hour."""
    command = [sys.executable, "-m", "tests.support.left_broadcast"]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr


def test_a_worker_that_waits_for_a_broadcast_can_be_shut_down() -> None:
    worker, timeout = Worker(), timedelta(hours=1)
    store = open_store("127.0.0.1", timeout)
    info = {"address": "127.0.0.1", "port": store.port, "key": "", "backend": "gloo", "world_size": 2}
    info["timeout_seconds"] = timeout.total_seconds()
    bucket = {"key": "", "names": ["weight"], "dtypes": ["float32"], "shapes": [[2]]}

    def receive() -> None:
        worker.call("/start_weight_update", {})
        worker.call("/init_weight_transfer_engine", {"init_info": info})
        with suppress(RuntimeError):  # the sender ends
            worker.call(UPDATE, {"update_info": bucket})

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    group = sender_group(store, "gloo", 2, "127.0.0.1", timeout)
    time.sleep(0.2)  # until it waits
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()
    del group
    receiving.join(60)
    assert not receiving.is_alive()


def test_the_server_follows_every_update(server: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**16)
    run = Run(tmp_path, server, transfer="broadcast")
    for step in range(3):
        run.engine.sync_weights(1)
        run.engine.sync_weights(1)  # nothing new
        run.assert_on_policy(step)
        assert 0 <= reported(run.engine)[PROBE_DIVERGENCE] < 1e-9
        found = Version.parse(server.version)
        assert found is not None and found.updates == step
        run.policy.model.save_pretrained(tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert server.worker.model.tensors.keys() == saved.keys() and server.worker.model.buckets > 3
        assert all(torch.equal(server.worker.model.tensors[name], tensor) for name, tensor in saved.items())
        run.update(step)
    assert "/collective_rpc" not in server.controlled and not (tmp_path / "weights").exists()


@pytest.mark.parametrize("times", [1, 99])
def test_a_transfer_that_is_cut_off_is_repeated_or_ends_the_run(
    server: WeightServer, tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step. Cut once: repeated. Always: an error, and the server's version is of no complete loading."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**16)
    run = Run(tmp_path, server, transfer="broadcast")
    run.engine.sync_weights(1)
    for step, path in enumerate(STEPS_OF_TRANSFER, 1):
        run.update(step)
        left, seen = [times], [0]

        def cut(asked: str, path: str = path, left: list[int] = left, seen: list[int] = seen) -> Reply | None:
            seen[0] += asked == path
            if asked != path or not left[0] or (path == UPDATE and seen[0] < 3):
                return None
            left[0] -= 1
            return Reply({}, {}, silent=True)

        server.before_control = cut
        if times == 1:
            run.engine.sync_weights(1)
            run.assert_on_policy(step)
            assert left == [0]
            continue
        with pytest.raises(ServerError, match=r"^3 broadcasts of the weights failed, the last with: .*run.resume=auto"):
            run.engine.sync_weights(1)
        found = Version.parse(server.version)
        assert found is not None and found.updates != step, path


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", UPDATE, "/finish_weight_update", RESET[-1]])
def test_a_server_that_restarts_in_a_transfer_is_sent_everything_again(
    server: WeightServer, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**16)
    run = Run(tmp_path, server, transfer="broadcast")
    left = [1]

    def restart(asked: str) -> None:
        if asked == path and left[0]:
            left[0] -= 1
            server.restart()

    server.before_control = restart  # type: ignore[assignment]
    run.engine.sync_weights(1)
    run.assert_on_policy(0)
    assert any("a broadcast of the weights failed" in line for line in run.lines)
    assert server.controlled.count("/start_weight_update") >= 2


def test_a_server_that_restarts_between_steps_or_was_left_in_a_transfer(server: WeightServer, tmp_path: Path) -> None:
    """Of one rank it is sent the weights again; an update that another process left unfinished is ended first."""
    server.worker.call("/start_weight_update", {})
    run = Run(tmp_path, server, transfer="broadcast")
    run.update()
    run.engine.sync_weights(1)
    run.assert_on_policy(1)
    server.restart()
    run.assert_on_policy(2)
    assert any("has lost the weights of this run" in line for line in run.lines)


def test_replicas_all_follow(tmp_path: Path) -> None:
    servers = [WeightServer(TINY) for _ in range(2)]
    run = Run(tmp_path, *servers, transfer="broadcast")
    for step in range(2):
        run.engine.sync_weights(1)
        run.assert_on_policy(step)
        run.update()
    for one in servers:
        one.stop()


def test_what_cannot_be_broadcast_is_refused_before_the_run(server: WeightServer, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"is broadcast, which takes vLLM and whole weights, and model\.lora is set"):
        Run(tmp_path, server, lora=LoraSettings(rank=2), transfer="broadcast")
    paths = server.schema.value["paths"]  # type: ignore[union-attr]
    del paths["/init_weight_transfer_engine"]
    with pytest.raises(ServerError, match=r"lacks /init_weight_transfer_engine"):
        Run(tmp_path, server, transfer="broadcast")
    server.models = {"data": [{"id": "tiny", "owned_by": "sglang"}]}
    with pytest.raises(ServerError, match=r"of kind sglang.*transfer=folder"):
        Run(tmp_path, server, transfer="broadcast")


def test_a_server_without_the_engine_is_told_how_to_start_it(server: WeightServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server, transfer="broadcast")
    server.before_control = lambda path: (
        Reply({"error": "Weight transfer not configured."}, {}, 500) if path == "/start_weight_update" else None
    )
    with pytest.raises(ServerError, match=r"not configured.*--worker-extension-cls and --weight-transfer-config"):
        run.engine.sync_weights(1)
