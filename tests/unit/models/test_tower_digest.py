"""The digest of a tower: another one for whatever may change a bit of its output, the same for everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.support.groups import tiny_policy
from tests.support.runs import save_tiny_model
from tests.support.tiny import VL_FAMILY_NAMES
from vlm_pg.models import tower_digest as module
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, ModelSettings


def digest(policy: Policy) -> str:
    return module.tower_digest(policy.model, policy.family)


def tower(policy: Policy) -> Any:
    return policy.family.vision_tower(policy.model)


def other_bit(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1


def forward_of_elsewhere(policy: Policy) -> None:
    """As liger-kernel puts its own functions there."""
    tower(policy).merger.mlp[1].forward = contextlib.nullcontext


def other_forward(policy: Policy) -> None:
    tower(policy).merger.forward = tower(policy).patch_embed.forward


CHANGES: dict[str, Callable[[Policy], Any]] = {
    "a bit of a block": lambda policy: other_bit(next(tower(policy).blocks.parameters())),
    "a bit of the merger": lambda policy: other_bit(tower(policy).merger.mlp[0].weight),
    "a bit of a buffer": lambda policy: other_bit(next(tower(policy).buffers())),
    "a buffer's dtype": lambda policy: tower(policy).rotary_pos_emb.to(torch.bfloat16),
    "the dtype": lambda policy: policy.model.to(torch.bfloat16),
    "the attention kernel": lambda policy: tower(policy).set_attn_implementation("eager"),
    "a number in the configuration": lambda policy: setattr(tower(policy).config, "window_size", 28),
    "a weight's name": lambda policy: tower(policy).register_buffer("more", torch.zeros(0)),
    "a function that runs a layer": other_forward,
    "one of another package": forward_of_elsewhere,
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


def test_where_it_is_computed_and_by_what_version_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    found = [digest(policy)]
    for target, name, value in (
        (module, "_version", lambda package: "0.0"),
        (module, "_processor", lambda: "another one"),
        (module, "_of_source", lambda name: "edited"),
        (torch, "get_num_threads", lambda: 7),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            found.append(digest(policy))
    assert len(set(found)) == len(found) and digest(policy) == found[0]


def test_what_torch_was_told_of_precision_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose name stands in here; torch's settings are those of this machine."""
    backends, gpu = torch.backends, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one GPU")
    found = [module._arithmetic(gpu)]
    for target, name, value in (
        (backends.cuda.matmul, "fp32_precision", "tf32"),
        (backends.cudnn.conv, "fp32_precision", "ieee"),
        (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ):
        before = getattr(target, name)
        setattr(target, name, value)
        found.append(module._arithmetic(gpu))
        setattr(target, name, before)
    backends.cuda.enable_flash_sdp(False)
    found.append(module._arithmetic(gpu))
    backends.cuda.enable_flash_sdp(True)
    assert module._arithmetic(gpu) == found[0] != module._arithmetic(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    found.append(module._arithmetic(gpu))
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_towers_of_two_families_differ_though_nothing_else_does() -> None:
    """What is made of a tower's output is the family's business."""
    policy, other = tiny_policy(family="qwen3_vl"), tiny_policy(family="qwen3_vl_moe")
    assert module.tower_digest(policy.model, policy.family) != module.tower_digest(policy.model, other.family)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.matrix) for name in VL_FAMILY_NAMES],
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


def test_a_checkpoint_without_a_weight_of_the_tower_is_refused_alone_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from vlm_pg.errors import ModelError

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
