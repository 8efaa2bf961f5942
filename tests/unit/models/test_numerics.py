"""The digest of the machine: another one for whatever may change a sum's last bits, the same for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
def processor_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """``processor`` for a content of /proc/cpuinfo."""

    def processor(text: str) -> list[str]:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
        return module.processor()

    return processor


@pytest.mark.parametrize("line", [*INTEL.splitlines(), *ARM.splitlines()])
def test_a_processor_is_more_than_its_model_name(processor_of: Callable[[str], list[str]], line: str) -> None:
    """All but its number, its core and its present speed."""
    text = INTEL if line in INTEL else ARM
    changed = text.replace(f"{line}\n", f"{line}9\n")
    momentary = line.startswith(("processor", "cpu MHz", "core id", "bogomips", "BogoMIPS"))
    assert (processor_of(text) == processor_of(changed)) is momentary


def test_cores_of_two_kinds_are_both_in_it(processor_of: Callable[[str], list[str]]) -> None:
    """In any order and number."""
    small = ARM.replace("0xd40", "0xd05")
    assert processor_of(ARM + small) == processor_of(small + ARM + ARM) != processor_of(ARM)


def test_an_unknown_processor_is_like_no_other_machines(
    processor_of: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for boot in ("1", "2", "1"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "boot_id")
        machine.this_machine.cache_clear()
        found.append(processor_of("processor\t: 0\nhart\t: 1\n"))
    assert found[0] == found[2] != found[1]
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "nothing")
    machine.this_machine.cache_clear()
    assert processor_of("") not in found
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


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    """A property of torch.backends."""
    path, _, last = name.rpartition(".")
    target = attrgetter(path)(torch.backends)
    before = getattr(target, last)
    setattr(target, last, value)
    yield
    setattr(target, last, before)


@contextmanager
def called(name: str, value: Any) -> Iterator[None]:
    """A function of torch that switches something for the process."""
    attrgetter(name)(torch)(value)
    yield
    attrgetter(name)(torch)(torch.float32 if isinstance(value, torch.dtype) else not value)


BACKENDS = {
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
}
FUNCTIONS = {
    "use_deterministic_algorithms": True,
    "set_default_dtype": torch.float64,
    "set_flush_denormal": True,
    "backends.cuda.enable_flash_sdp": False,
    "backends.cuda.enable_mem_efficient_sdp": False,
    "backends.cuda.enable_math_sdp": False,
    "backends.cuda.enable_cudnn_sdp": False,
    "backends.cuda.allow_fp16_bf16_reduction_math_sdp": True,
}
VARIABLES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "OPENBLAS_CORETYPE_"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED"),
)
KERNELS_REVERSED = list(torch.nn.attention.SDPBackend.__members__.values())[:0:-1]
SWITCHES: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[Any] | None]] = {
    **{name: lambda _, given=(name, value): changed(*given) for name, value in BACKENDS.items()},
    **{name: lambda _, given=(name, value): called(*given) for name, value in FUNCTIONS.items()},
    **{name: lambda patched, name=name: patched.setenv(name, "1") for name in VARIABLES},
    "order of attention kernels": lambda _: torch.nn.attention.sdpa_kernel(KERNELS_REVERSED, True),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "threads": lambda patched: patched.setattr(torch, "get_num_threads", lambda: 7),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_torch_and_its_libraries_are_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_digest(CPU)
    with monkeypatch.context() as patched, SWITCHES[name](patched) or nullcontext():
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
    assert machine.this_machine() in found[-1], "an unknown driver may be another machine's"
    for target, name, value in (
        (torch.version, "cuda", "1.0"),
        (torch.version, "hip", "1.0"),
        (torch.backends.cudnn, "version", lambda: 1),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            found.append(module.gpu(GPU))
    assert all(one != other for index, one in enumerate(found) for other in found[:index])


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
