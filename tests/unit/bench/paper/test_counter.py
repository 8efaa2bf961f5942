"""Memory, waits and gradients of a count, in miniatures."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.groups import tiny_policy
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.case import random_model
from vlm_pg.bench.paper.counter import count, fake_mode
from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.paper.host import caller, reason_for
from vlm_pg.bench.step import CONTESTANTS
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower_inputs import tower_inputs
from vlm_pg.processes import resolve

pytestmark = pytest.mark.usefixtures("thawed")

KIB = 1024


def counted(run: Callable[..., Any], *shapes: tuple[int, ...], trained: bool = False) -> Counts:
    fakes = fake_mode()
    with fakes:
        operands = [torch.empty(shape, requires_grad=trained) for shape in shapes]
    return count(lambda: run(*operands), fakes)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_caller_has_frozen_stays_frozen(frozen: bool, fails: bool) -> None:
    """Inside all that was there is, whoever froze what; afterwards as before, also where the work fails."""
    before = gc.get_freeze_count()
    (gc.freeze if frozen else gc.unfreeze)()
    later: list[int] = []
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(any(one is later for one in gc.get_objects()))
        return x + (1 // 0 if fails else 1)

    try:
        with suppress(ZeroDivisionError):
            counted(run, (4,))
        assert seen == [False], "what came after the caller froze would be looked through again and again"
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        (gc.freeze if before else gc.unfreeze)()


def test_whether_there_is_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(None)))
    counted(lambda x: [x + torch.ones(4) for _ in range(3)], (4,))
    assert len(asked) == 1


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="autograd's threads are a GPU's")
def test_after_a_count_a_process_can_still_be_forked() -> None:
    """In a fresh one: autograd starts its threads once."""
    program = """
import os, torch
from vlm_pg.bench.paper.counter import count, fake_mode
fakes = fake_mode()
with fakes:
    x = torch.empty(4, requires_grad=True)
count(lambda: x.sum().backward(), fakes)
if not (child := os.fork()):
    torch.ones(4, requires_grad=True).sum().backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_was_there_is_not_counted_and_views_are_counted_once() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        first = x[:128] + 1  # half a KiB of 128 numbers
        second = x + first.repeat(2)  # 1 KiB repeated, which goes, and 1 KiB
        del first
        return second.view(16, 16)[:2]

    found = counted(run, (256,))
    assert found.peak_bytes == KIB // 2 + KIB + KIB
    assert found.end_bytes == 0


def test_gradients_stay_and_are_added_in_place() -> None:
    def run(weight: torch.Tensor) -> None:
        for _ in range(2):
            (weight * 2).sum().backward()

    found = counted(run, (256,), trained=True)
    assert found.end_bytes == KIB
    # The second gradient is added to the first: both read, one written.
    assert found.bytes["elementwise", "add_"] == 3 * KIB


def test_gradients_of_two_paths_are_added() -> None:
    found = counted(lambda w: ((w * 2).sum() + (w * 3).sum()).backward(), (256,), trained=True)
    assert found.launches["add"] == 2  # of the two sums, and of the two gradients


def test_a_storage_that_grows_is_counted_as_it_is() -> None:
    def run(x: torch.Tensor) -> None:
        y = x + 1
        y.resize_(1024)

    assert counted(run, (256,)).peak_bytes == 4 * KIB


def test_a_place_in_memory_that_was_there_may_be_taken_by_something_new() -> None:
    """What was there goes while counting; what comes to its address afterwards counts."""
    fakes = fake_mode()
    with fakes:
        held = [torch.empty(256) for _ in range(50)]

    def run() -> None:
        for x in held:
            x.add_(1)
        del x
        held.clear()
        gc.collect()
        with fakes:
            pass
        held.extend(torch.empty(256, dtype=torch.float32) + 0.0 for _ in range(50))

    assert count(run, fakes).end_bytes == 50 * KIB


def test_layers_that_are_computed_again_are_not_all_held() -> None:
    """Eight checkpointed layers hold their inputs and one layer's insides, not eight layers' insides."""
    layers, inside = 8, 16

    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(inside):
            x = x.exp()
        return x

    def run(x: torch.Tensor) -> None:
        for _ in range(layers):
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    found = counted(run, (1024,), trained=True)
    each = 4 * KIB
    assert (layers + inside) * each <= found.peak_bytes <= (layers + inside + 4) * each


WAITING: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("item", lambda x: x.sum().item()),
    ("float", lambda x: float(x.sum())),
    ("bool", lambda x: bool((x > 0).any())),
    ("cpu", lambda x: x.cpu()),
    ("to", lambda x: x.to("cpu")),
    ("to by name", lambda x: x.to(device="cpu")),
    ("tolist", lambda x: x[:1].tolist()),
    ("numpy", lambda x: x.numpy()),
    ("nonzero", lambda x: torch.tensor([0, 1]).nonzero()),
    ("mask", lambda x: x[torch.tensor([True, False, True, False])]),
    ("equal", lambda x: torch.equal(torch.tensor([1]), torch.tensor([1]))),
    ("repeats", lambda x: torch.tensor([0, 1]).repeat_interleave(torch.tensor([1, 2]))),
]


HERE = torch.device("cpu")  # which stands for the device
WAITING += [
    ("made on the device", lambda x: torch.tensor([0, 1], device=HERE)),
    ("moved", lambda x: torch.tensor([0, 1]).to(HERE)),
    ("copied", lambda x: x.int().copy_(torch.tensor([0, 1, 2, 3]))),
]
NOT_WAITING_MOVES = [
    lambda x: torch.tensor([0, 1]).to(HERE, non_blocking=True).to(HERE),
    lambda x: x.int().copy_(torch.tensor([0, 1, 2, 3]), non_blocking=True),
    lambda x: torch.arange(4, device=HERE).to(HERE),
]


@pytest.mark.parametrize("run", [case[1] for case in WAITING], ids=[case[0] for case in WAITING])
def test_waits_are_counted_with_their_line(run: Callable[[torch.Tensor], Any]) -> None:
    (where,) = (found := counted(run, (4,)).waits)
    # How often something repeats is asked twice: how long the result is, and whether no number is negative.
    assert found[where] == (2 if "repeat_interleave" in run.__code__.co_names else 1)
    assert "bench/paper/test_counter.py:" in where and where.endswith("<lambda>")


NOT_WAITING: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.to(x.device),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.to(x),
    lambda x: x[torch.tensor([0, 2])],
    lambda x: torch.tensor([0, 1]).repeat_interleave(torch.tensor([1, 2]), output_size=3),
    lambda x: torch.tensor([1.0, 2.0]),
    *NOT_WAITING_MOVES,
]


@pytest.mark.parametrize("run", NOT_WAITING)
def test_what_does_not_wait(run: Callable[[torch.Tensor], Any]) -> None:
    assert not counted(run, (4,)).waits


@pytest.mark.parametrize("name", ["grouped", "grouped-chunked"])
def test_an_update_waits_where_it_is_said_and_packing_is_the_hosts(name: str) -> None:
    fakes = fake_mode()
    settings = ModelSettings(path="small", dtype="bf16", gradient_checkpointing=True)
    policy = fake_policy(lambda: random_model("small", dtype=torch.bfloat16), settings, fakes, CudaFlashKernel())
    case = TrainingCase.random(policy, 20, [6, 4])
    found = count(lambda: case.run(resolve(CONTESTANTS[name].run)), fakes)
    assert found.waits.total() == 1
    assert [where for where in found.waits if not reason_for(*where.split(" "))] == []
    # Packing looks for the end of equal beginnings, bounds and masks; on the device none of that runs.
    assert "nonzero" not in found.launches and "equal" not in found.launches


def test_a_wait_within_an_update_without_a_reason_shows() -> None:
    fakes = fake_mode()
    settings = ModelSettings(path="small", dtype="bf16")
    policy = fake_policy(lambda: random_model("small", dtype=torch.bfloat16), settings, fakes, CudaFlashKernel())

    def waiting(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        assert args[0].sum().item() == 0

    policy.language_model.layers[0].mlp.register_forward_pre_hook(waiting)
    case = TrainingCase.random(policy, 20, [6, 4])
    found = count(lambda: case.run(resolve(CONTESTANTS["grouped"].run)), fakes)
    (where,) = (where for where in found.waits if not reason_for(*where.split(" ")))
    assert where.endswith(" waiting") and found.waits[where] == 1


def test_what_a_tower_works_out_from_grids_is_the_hosts() -> None:
    """Numbers too: of pictures of other sizes Qwen3-VL's tower is given weights between its positions."""
    policy = tiny_policy(family="qwen3_vl")
    tower = policy.family.vision_tower(policy.model)
    found = count(lambda: tower_inputs(tower, torch.tensor([[1, 4, 6]]), torch.device("cpu")), fake_mode())
    assert not found.total_launches and not found.waits


def test_lines_of_ours_are_named_from_the_package_on() -> None:
    """Not by the folder that a checkout happens to have."""
    code = compile("def asks(caller):\n    return caller()\n", "/somewhere/wt-a/vlm_pg/rollout/engine.py", "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["asks"](caller) == ("vlm_pg/rollout/engine.py:2", "asks")
