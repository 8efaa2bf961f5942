"""Who computes: another digest for whatever may change a sum's last bits, the same for everything else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_pg.cache import provenance as machine
from vlm_pg.models import digests as module
from vlm_pg.models.digests import numerics_digest

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel Xeon Processor
stepping\t: 8
cpu MHz\t\t: 2100.000
cache size\t: 16384 KB
core id\t\t: 0
flags\t\t: fpu sse2 avx2 avx512f amx_tile
bogomips\t: 4200.00
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """``processor`` where /proc/cpuinfo says that."""

    def say(text: str) -> list[str]:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
        return module.processor()

    return say


@pytest.mark.parametrize("line", [*INTEL.splitlines(), *ARM.splitlines()])
def test_a_processor_is_more_than_its_model_name(said: Callable[[str], list[str]], line: str) -> None:
    """All but its number, its place and its present speed."""
    text = INTEL if line in INTEL else ARM
    changed = text.replace(f"{line}\n", f"{line}9\n")
    momentary = line.startswith(("processor", "cpu MHz", "core id", "bogomips", "BogoMIPS"))
    assert (said(text) == said(changed)) is momentary


def test_cores_of_two_kinds_are_both_told_of(said: Callable[[str], list[str]]) -> None:
    """In no order, and however many there are."""
    small = ARM.replace("0xd40", "0xd05")
    assert said(ARM + small) == said(small + ARM + ARM) != said(ARM)


def test_an_unknown_processor_is_like_no_other_machines(
    said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for boot in ("1", "2", "1"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "boot_id")
        machine.this_machine.cache_clear()
        found.append(said("processor\t: 0\nhart\t: 1\n"))
    assert found[0] == found[2] != found[1]
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "nothing")
    machine.this_machine.cache_clear()
    assert said("") not in found
    machine.this_machine.cache_clear()


def test_caches_are_among_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Libraries cut matrices by them."""
    for number, size in enumerate(("48K", "2048K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(module, "_CACHES", tmp_path)
    found = [module.processor()]
    (tmp_path / "index1" / "size").write_text("1024K\n")
    assert module.processor() != found[0] and "index0 size 48K" in found[0]


class Changed(AbstractContextManager[None]):
    """A property of torch's backends, which are no modules like others: they have it from a function."""

    def __init__(self, name: str, value: Any):
        path, _, self._name = name.rpartition(".")
        self._target, self._value = attrgetter(path)(torch.backends), value
        self._before = getattr(self._target, self._name)

    def __enter__(self) -> None:
        setattr(self._target, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        setattr(self._target, self._name, self._before)


def changed(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda _: Changed(name, value)


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda _: context()


def variable(name: str) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda patched: patched.setenv(name, "1")


class Called(AbstractContextManager[None]):
    """A function of torch's that sets something for all of the process; ``then`` undoes it."""

    def __init__(self, name: str, now: Any, then: Any):
        self._call, self._now, self._then = attrgetter(name)(torch), now, then

    def __enter__(self) -> None:
        self._call(self._now)

    def __exit__(self, *_: object) -> None:
        self._call(self._then)


def torch_call(name: str, now: Any, then: Any) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda _: Called(name, now, then)


TOLD: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    **{
        name: changed(name, value)
        for name, value in {
            "cuda.matmul.fp32_precision": "tf32",
            "cudnn.conv.fp32_precision": "ieee",
            "mkldnn.matmul.fp32_precision": "bf16",
            "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
            "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
            "cuda.matmul.allow_fp16_accumulation": True,
            "cudnn.enabled": False,
            "cudnn.benchmark": True,
            "cudnn.benchmark_limit": 3,
            "cudnn.deterministic": True,
            "mkldnn.deterministic": True,
            "mkldnn.enabled": False,
        }.items()
    },
    "deterministic": torch_call("use_deterministic_algorithms", True, False),
    "default dtype": torch_call("set_default_dtype", torch.float64, torch.float32),
    "subnormal numbers": torch_call("set_flush_denormal", True, False),
    "flash attention": torch_call("backends.cuda.enable_flash_sdp", False, True),
    "attention in blocks": torch_call("backends.cuda.enable_mem_efficient_sdp", False, True),
    "plain attention": torch_call("backends.cuda.enable_math_sdp", False, True),
    "cuDNN's attention": torch_call("backends.cuda.enable_cudnn_sdp", False, True),
    "attention's sums": torch_call("backends.cuda.allow_fp16_bf16_reduction_math_sdp", True, False),
    "which attention comes first": inside(
        lambda: torch.nn.attention.sdpa_kernel(list(torch.nn.attention.SDPBackend.__members__.values())[:0:-1], True)
    ),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "threads": lambda patched: patched.setattr(torch, "get_num_threads", lambda: 7),
    **{
        name: variable(name)
        for name in (
            *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
            *("ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "OPENBLAS_CORETYPE_"),
            *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED"),
        )
    },
}


@pytest.mark.parametrize("what", TOLD)
def test_what_torch_and_its_libraries_are_told_is_among_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_digest(CPU)
    with monkeypatch.context() as patched:
        around = TOLD[what](patched)
        if isinstance(around, AbstractContextManager):
            with around:
                assert numerics_digest(CPU) != before
        else:
            assert numerics_digest(CPU) != before
    assert numerics_digest(CPU) == before


def test_what_has_no_part_in_sums_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_digest(CPU)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "HF_HOME", "OMP_PROC_BIND", "TORCH_HOME"):
        monkeypatch.setenv(name, "3")
    torch.manual_seed(5)
    assert numerics_digest(CPU) == before


def test_autocast_counts_where_it_is_on() -> None:
    before = module.process_switches(GPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.process_switches(GPU) == before


FACTS = {"name": "another", "major": 10, "minor": 3, "multi_processor_count": 66, "L2_cache_size": 1}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """One stands in here, with its driver."""
    state = SimpleNamespace(name="one GPU", major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: state)
    monkeypatch.setattr(machine, "_DRIVERS", (tmp_path / "driver",))
    (tmp_path / "driver").write_text("NVRM version: 580.1\n")
    return state


@pytest.mark.parametrize("name", FACTS)
def test_a_gpu_is_more_than_its_name(gpu: SimpleNamespace, name: str) -> None:
    before = module.gpu(GPU)
    setattr(gpu, name, FACTS[name])
    assert module.gpu(GPU) != before


def test_its_driver_and_libraries_are_among_it(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [module.gpu(GPU)]
    (tmp_path / "driver").write_text("NVRM version: 590.2\n")
    found.append(module.gpu(GPU))
    (tmp_path / "driver").unlink()
    found.append(module.gpu(GPU))
    assert machine.this_machine() in found[-1], "of an unknown driver nobody knows whether it is another's"
    for target, name, value in (
        (torch.version, "cuda", "1.0"),
        (torch.version, "hip", "1.0"),
        (torch.backends.cudnn, "version", lambda: 1),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            found.append(module.gpu(GPU))
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_the_build_of_torch_and_versions_are_among_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for target, name, value in (
        (torch.__config__, "show", lambda: "MKL 1"),
        (module, "_versions", lambda: {"torch": "0"}),
        (torch.backends.cpu, "get_cpu_capability", lambda: "of no processor"),
        (module, "processor", lambda: ["another"]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            module._host.cache_clear()
            found.append(numerics_digest(CPU))
    module._host.cache_clear()
    found.append(numerics_digest(CPU))
    assert len(set(found)) == len(found)
    assert {"torch", "transformers"} <= module._versions().keys()
