"""Memory, waits and gradients of a count, in miniatures."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scripts.bench.counting import (
    Counts,
    caller,
    count,
    fake_mode,
    fake_policy,
    reference_operators,
    replaced,
    triton_launches,
)
from tests.support.groups import tiny_policy
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.case import random_model
from vlm_pg.bench.step import CONTESTANTS
from vlm_pg.bench.step_case import TrainingCase
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower import tower_inputs
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
    assert found.bytes["other", "add_"] == 3 * KIB


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
    assert "bench/test_counting.py:" in where and where.endswith("<lambda>")


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
    # The loss is handed back as a number, once behind the last backward.
    assert [where.split(" ")[1] for where in found.waits] == ["_step"]
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
    (where,) = (where for where in found.waits if not where.endswith(" _step"))
    assert where.endswith(" waiting") and found.waits[where] == 1


def test_what_a_tower_works_out_from_grids_is_the_hosts() -> None:
    """Numbers too: of pictures of other sizes Qwen3-VL's tower is given weights between its positions."""
    policy = tiny_policy(family="qwen3_vl")
    tower = policy.family.vision_tower(policy.model)
    found = count(lambda: tower_inputs(tower, torch.tensor([[1, 4, 6]]), torch.device("cpu")), fake_mode())
    assert not found.launches.total() and not found.waits


def test_lines_of_ours_are_named_from_the_package_on() -> None:
    """Not by the folder that a checkout happens to have."""
    code = compile("def asks(caller):\n    return caller()\n", "/somewhere/wt-a/vlm_pg/rollout/engine.py", "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["asks"](caller) == "vlm_pg/rollout/engine.py:2 asks"


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    @staticmethod
    def static() -> str:
        return "static"

    def own(self) -> str:
        return "own"


NAMES = ("inherited", "static", "own", "never_there")


def owners() -> list[Any]:
    module = ModuleType("module")
    vars(module).update(own=len, static=print)
    thing = Owner()
    thing.own = lambda: "the object's"  # type: ignore[method-assign]
    linear = torch.nn.Linear(1, 1)  # sets attributes in its own way
    return [Owner, module, thing, linear]


@pytest.mark.parametrize("owner", owners(), ids=("class", "module", "object", "torch module"))
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(owner: Any, fails: bool) -> None:
    usual = dict(vars(owner))
    try:
        with replaced(owner, **dict.fromkeys(NAMES, len)), replaced(owner, own=max, inherited=max):
            assert (owner.own, owner.inherited, owner.static, owner.never_there) == (max, max, len, len)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert vars(owner).keys() == usual.keys()
    assert all(vars(owner)[name] is value for name, value in usual.items())


def test_a_packages_function_gives_way_while_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family="qwen3_5")
    module: Any = sys.modules[type(policy.model).__module__]
    name = "torch_chunk_gated_delta_rule"
    there = getattr(module, name)

    @functools.wraps(there)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it needs a GPU")

    monkeypatch.setattr(module, name, compiled)
    with reference_operators(policy.model):
        inside = getattr(module, name)
        assert inside.__name__ == name and not hasattr(inside, "__wrapped__")
    assert getattr(module, name) is compiled


def test_triton_launches_are_noted_and_not_run() -> None:
    """Of a plain and of a tuned kernel; queries and keys that liger's rotates where they lie are read and written."""
    triton = pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    before, found = JITFunction.run, []
    kernel = JITFunction(_kernel)
    tuned = triton.autotune([triton.Config({"SIZE": 1}), triton.Config({"SIZE": 2})], key=["n"])(kernel)
    rope = JITFunction(_triton_rope)
    x = torch.empty(8)
    with triton_launches(lambda *launch: found.append(launch)):
        kernel[(1,)](x, 8, SIZE=1)
        tuned[(1,)](x, 8)
        rope[(1,)](torch.empty(10), 3, torch.empty(4), cos=torch.empty(3))
    assert found == [("_kernel", 32), ("_kernel", 32), ("_triton_rope", 4 * (20 + 8 + 3))]
    assert JITFunction.run is before


def _kernel(x_ptr, n, SIZE):  # type: ignore[no-untyped-def]
    raise AssertionError("it runs nowhere")


def _triton_rope(q_ptr, n, k_ptr, cos):  # type: ignore[no-untyped-def]
    raise AssertionError("it runs nowhere")
