"""The digest of a tower: another one for whatever may change a bit of its output, the same for everything else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.support.groups import make_case, tiny_policy
from tests.support.runs import save_tiny_model
from tests.support.tiny import VL_FAMILY_NAMES
from vlm_pg.cache import provenance as machine
from vlm_pg.errors import ModelError
from vlm_pg.models import digests as module
from vlm_pg.models.digests import numerics_digest
from vlm_pg.models.layer_globals import set_layer_globals
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import adapts_tower
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import LoraSettings, ModelSettings


def digest(policy: Policy) -> str:
    return module.tower_digest(policy.model, policy.family)


def tower(policy: Policy) -> Any:
    return policy.family.vision_tower(policy.model)


def other_bit(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1


def function_of_its_own(policy: Policy) -> None:
    """A layer of the tower calls another one by that name, and its module's stays: liger-kernel's rotation."""
    assert set_layer_globals(tower(policy).blocks[0].attn, {"apply_rotary_pos_emb_vision": contextlib.nullcontext})


CHANGES: dict[str, Callable[[Policy], Any]] = {
    "a bit of a block": lambda policy: other_bit(next(tower(policy).blocks.parameters())),
    "a bit of the merger": lambda policy: other_bit(tower(policy).merger.mlp[0].weight),
    "a bit of a buffer": lambda policy: other_bit(next(tower(policy).buffers())),
    "a buffer's dtype": lambda policy: tower(policy).rotary_pos_emb.to(torch.bfloat16),
    "the dtype": lambda policy: policy.model.to(torch.bfloat16),
    "the attention kernel": lambda policy: tower(policy).set_attn_implementation("eager"),
    "a number in the configuration": lambda policy: setattr(tower(policy).config, "window_size", 28),
    "a weight's name": lambda policy: tower(policy).register_buffer("more", torch.zeros(0)),
    "another layer's forward": lambda policy: setattr(
        tower(policy).merger, "forward", tower(policy).patch_embed.forward
    ),
    "a forward of another package": lambda policy: setattr(
        tower(policy).merger.mlp[1], "forward", contextlib.nullcontext
    ),
    "what a layer calls by a name": function_of_its_own,
    "a layer that is compiled": lambda policy: tower(policy).merger.compile(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_output_changes_the_digest(change: str) -> None:
    policy = tiny_policy()
    before = digest(policy)
    CHANGES[change](policy)
    assert digest(policy) != before


def test_what_adapters_in_it_count_is_in_it() -> None:
    """Their weights, names and shapes are equal; that other factor is nowhere among them."""

    def with_adapter(alpha: int) -> Policy:
        policy = tiny_policy()
        torch.manual_seed(0)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["qkv"], init_lora_weights=False), tower(policy)
        )
        return policy

    digests = {digest(with_adapter(8)), digest(with_adapter(64)), digest(tiny_policy())}
    assert len(digests) == 3 and digest(with_adapter(8)) in digests
    off = with_adapter(8)
    for layer in tower(off).modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(False)
    assert digest(off) not in digests


def test_where_a_configuration_comes_from_changes_nothing() -> None:
    policy = tiny_policy()
    before = digest(policy)
    tower(policy).config._name_or_path, tower(policy).config.architectures = "elsewhere", ["Model"]
    assert digest(policy) == before


def test_its_code_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules' source, what stands there under the names they call, the kernel behind a name, ours, a version."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return sdpa_attention_forward(*arguments, **options)

    policy = tiny_policy()
    found = [digest(policy)]
    for change in (
        lambda patched: patched.setattr(module, "_of_source", lambda name: "edited"),
        lambda patched: patched.setattr(module, "version", lambda package: "0.0"),
        lambda patched: patched.setattr(module, "OWN_CODE", ("vision",)),
        lambda patched: patched.setattr(modeling, "apply_rotary_pos_emb_vision", wrapped),
        lambda patched: patched.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrapped),
    ):
        with monkeypatch.context() as patched:
            change(patched)
            found.append(digest(policy))
    assert len(set(found)) == len(found) and digest(policy) == found[0]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pieces": {"vision_piece_tokens": 1},
    "DeepStack": {"family": "qwen3_vl"},
    "lockstep": {},
}


@pytest.mark.parametrize("case", CASES)
def test_no_module_of_ours_on_the_way_is_forgotten(case: str) -> None:
    """From pixels to features: whatever runs there is among the code that the digest is of."""
    policy = tiny_policy(**CASES[case])
    prompts = [make_case(policy, kind, seed).prompt for seed, kind in enumerate(("image", "video", "image+video"))]
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_globals.get("__name__", ""))

    with policy.independent_ranks(scattered=True) if case == "lockstep" else contextlib.nullcontext():
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            policy.vision.encode(prompts)
        finally:
            sys.setprofile(before)
    names = {name.removeprefix("vlm_pg.models.") for name in ran if name.startswith("vlm_pg.")}
    names = {name for name in names if not name.startswith("vlm_pg.distributed.")}
    # What holds and counts prompts and ranks makes no numbers.
    assert {"vision", "network", "family"} <= names <= {*module.OWN_CODE, *OF_NO_NUMBERS}


OF_NO_NUMBERS = ("vlm_pg.memory", "vlm_pg.types", "checks")


@pytest.mark.matrix
def test_the_same_tower_on_the_same_host_has_the_same_digests_in_another_process(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    code = (
        "import torch; from vlm_pg.models.loading import load_policy; from vlm_pg.models.digests import "
        "numerics_digest; from vlm_pg.models.digests import tower_digest; "
        f"torch.set_num_threads({torch.get_num_threads()}); policy = load_policy({str(folder)!r}); "
        "print(tower_digest(policy.model, policy.family), numerics_digest(policy.device))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [digest(load_policy(folder)), numerics_digest(torch.device("cpu"))]


def test_towers_of_two_families_differ_though_nothing_else_does() -> None:
    """What is made of a tower's output is the family's business."""
    policy, other = tiny_policy(family="qwen3_vl"), tiny_policy(family="qwen3_vl_moe")
    assert module.tower_digest(policy.model, policy.family) != module.tower_digest(policy.model, other.family)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.matrix) for name in VL_FAMILY_NAMES]
)
def test_a_frozen_tower_has_one_digest_wherever_it_comes_from(tmp_path: Path, family: str) -> None:
    """Read whole or alone, saved again after training, with an adapter beside it, under another path."""
    folder = save_tiny_model(tmp_path / "model", family)
    policy = load_policy(folder)
    expected = digest(policy)
    with torch.no_grad():
        for weight in policy.language_model.parameters():
            weight.mul_(1.5)
    policy.weights_changed()
    policy.model.save_pretrained(tmp_path / "checkpoint")
    policy.processor.save_pretrained(tmp_path / "checkpoint")
    lora = ModelSettings(path=str(folder), lora=LoraSettings(rank=2), gradient_checkpointing=True)
    adapted = load_policy(folder, settings=lora)
    adapted.model.save_pretrained(tmp_path / "adapter")
    found = {
        "trained": policy,
        "saved": load_policy(tmp_path / "checkpoint"),
        "adapted": adapted,
        "alone": load_policy(folder, vision_alone=True),
        "alone, trained": load_policy(tmp_path / "checkpoint", vision_alone=True),
        "alone, adapted": load_policy(tmp_path / "adapter", settings=lora, vision_alone=True),
    }
    assert {name: digest(one) == expected for name, one in found.items()} == dict.fromkeys(found, True)
    alone = sum(weight.numel() for weight in found["alone"].language_model.parameters())
    assert 0 < alone < 200, "an embedding of one token and a norm"


@pytest.mark.parametrize("targets", [("qkv",), ("qkv", "q_proj"), ("q_proj",)], ids=" ".join)
def test_an_adapter_in_the_tower_is_read_with_the_tower_alone(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """Then the whole model is; one of the language model changes nothing."""
    folder = save_tiny_model(tmp_path / "model")
    model = load_policy(folder).model
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    whole, alone = (load_policy(tmp_path / "adapter", vision_alone=alone) for alone in (False, True))
    in_tower = "qkv" in targets
    assert digest(alone) == digest(whole) and (digest(whole) != digest(load_policy(folder))) is in_tower
    assert bool(len(alone.language_model.layers)) is in_tower


def test_an_adapter_whose_file_does_not_say_is_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"anything")
    assert adapts_tower(tmp_path, FAMILIES["qwen2_5_vl"]) and not adapts_tower(tmp_path, FAMILIES["qwen3"])
    (tmp_path / "adapter_model.safetensors").write_bytes(b"anything")
    with pytest.raises(ModelError, match="copy the file again from where it comes from"):
        adapts_tower(tmp_path, FAMILIES["qwen2_5_vl"])


def test_a_checkpoint_without_a_weight_of_the_tower_is_refused_alone_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    lacking = next(name for name in weights if "merger" in name)
    for change in ({}, {lacking: weights[lacking][:-1].clone()}):
        save_file({name: value for name, value in weights.items() if name != lacking} | change, file, {"format": "pt"})
        with pytest.raises(ModelError, match=r"lacks 1 of its weights \(model\.visual\.merger"):
            load_policy(folder, vision_alone=True)


def test_weights_are_gathered_one_at_a_time() -> None:
    """As under ZeRO-3, where every rank makes the same calls in the same order."""
    policy = tiny_policy()
    expected, held, most = digest(policy), [0], [0]
    whole = {id(weight): weight.data for weight in tower(policy).parameters()}

    @contextlib.contextmanager
    def gathered(weights: Any) -> Iterator[None]:
        chosen = list(weights)
        held[0] += len(chosen)
        most[0] = max(most[0], held[0])
        for weight in chosen:
            weight.data = whole[id(weight)]
        yield
        for weight in chosen:
            weight.data = torch.empty(0)
        held[0] -= len(chosen)

    for weight in tower(policy).parameters():
        weight.ds_id, weight.data = 0, torch.empty(0)
    assert module.tower_digest(policy.model, policy.family, gathered) == expected and most == [1]
    assert digest(policy) != expected


def test_scales_of_weights_in_few_bits_are_in_it() -> None:
    policy = tiny_policy()

    class Scales:
        def __init__(self, value: float):
            self.value = value

        def as_dict(self, packed: bool) -> dict[str, torch.Tensor]:
            return {"absmax": torch.tensor([self.value])}

    found = [digest(policy)]
    for value in (1.0, 2.0):
        next(tower(policy).parameters()).quant_state = Scales(value)
        found.append(digest(policy))
    assert len(set(found)) == 3


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
