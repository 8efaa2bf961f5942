"""Rank layouts, atomic files, sizes, and torch.distributed in one package alone."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import ROOT
from vlm_pg.distributed import (
    LAUNCHER_VARIABLES,
    SINGLE_RANK,
    RankLayout,
    barrier,
    collectives,
    is_distributed,
    join_ranks,
    local_device,
)
from vlm_pg.errors import ConfigError
from vlm_pg.files import replacing, write_bytes_atomic
from vlm_pg.memory import free_bytes, host_bytes, tensor_bytes

DISTRIBUTED = ROOT / "vlm_pg" / "distributed"


def uses_torch_distributed(tree: ast.AST) -> bool:
    """Imported in any way, also for types alone or by name, or reached as an attribute of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Constant):
            names = [str(node.value)]
        else:
            continue
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
            return True
    return False


def test_one_package_uses_torch_distributed() -> None:
    """Beside what runs in vLLM's processes, and imports nothing of this project."""
    files = [path for folder in ("vlm_pg", "data_pipelines") for path in (ROOT / folder).rglob("*.py")]
    found = {path.parent for path in files if uses_torch_distributed(ast.parse(path.read_text()))}
    assert found == {DISTRIBUTED, ROOT / "vlm_pg" / "rollout" / "server" / "vllm_plugin"}


def test_ranks_lie_in_rows_of_sequence_ranks() -> None:
    assert RankLayout.here() == SINGLE_RANK == RankLayout(0, 1)
    layouts = [RankLayout(rank, 6, 2) for rank in range(6)]
    assert [(one.data_rank, one.sequence_rank) for one in layouts] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {one.data_size for one in layouts} == {3} and [one.is_rank0 for one in layouts] == [True] + [False] * 5


@pytest.mark.parametrize("layout", [(2, 2, 1), (-1, 2, 1), (0, 6, 4), (0, 2, 0)])
def test_a_layout_that_cannot_be_is_refused(layout: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"no rank {layout[0]} in {layout[1]} processes with {layout[2]}"):
        RankLayout(*layout)


def test_a_file_appears_whole_with_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_bytes_atomic(path, b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        # What RunFolder.create clears away after a kill.
        assert Path(file.name).name.startswith(".a.json.") and file.name.endswith(".tmp")
    plain = tmp_path / "plain"
    plain.touch()
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.json", "plain"}


@pytest.mark.parametrize("durable", [True, False])
def test_durable_files_and_their_folder_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    write_bytes_atomic(tmp_path / "a", b"x", durable)
    assert synced == ([False, True] if durable else [])


def test_what_raises_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes_atomic(path, b"old")
    with pytest.raises(OSError, match="no space") as caught, replacing(path):
        raise OSError(28, "no space")
    assert caught.value.filename == str(path)  # the system names no file where a write fails
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_sizes() -> None:
    assert tensor_bytes(torch.zeros(3, 5), None, torch.zeros(7, dtype=torch.bfloat16)) == 3 * 5 * 4 + 7 * 2
    assert 0 < free_bytes(torch.device("cpu")) <= host_bytes()


def test_a_process_that_cannot_find_the_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    join_ranks()  # started alone
    assert not is_distributed()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        join_ranks()


def test_tensors_are_joined_for_collectives_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is in one bucket, in order; none mixes dtypes or grows beyond the size but by a single tensor."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 40)
    sizes = [3, 4, 3, 11, 1, 2]
    tensors = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    tensors[4] = tensors[4].double()
    buckets = [[int(tensor[0]) for tensor in bucket] for bucket in collectives._buckets(tensors)]
    assert buckets == [[0, 1, 2], [3], [4], [5]]
    before = [tensor.clone() for tensor in tensors]
    collectives.sum_tensors_over_ranks(tensors)  # of one process
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


@pytest.mark.parametrize("backend, device_ids", [("nccl", [3]), ("gloo", None)])
def test_a_barrier_is_on_the_device_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, backend: str, device_ids: list[int] | None
) -> None:
    """NCCL's own guess, rank modulo devices, may be another rank's."""
    import torch.distributed as dist

    given: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: given.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    barrier()
    assert given == [device_ids]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 4, and 4 GPU\(s\) can be seen here \(0 to 3\)"):
        local_device()


def test_what_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert free_bytes(torch.device("cuda", 0)) == 10 + 50 - 20
