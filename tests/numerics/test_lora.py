"""Grouped with an adapter equals repeated with the same adapter: values and the gradient of every A and B."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.groups import gradient_errors, make_case, random_group, repeated_logprobs, weighted_sum
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import load_policy, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import AdapterFreeReference
from vlm_pg.models.settings import PARTS, LoraSettings, ModelSettings

peft = pytest.importorskip("peft")

from vlm_pg.models.lora import adapter_disabled, adapter_parameters, add_lora, load_adapter  # noqa: E402

LORA = LoraSettings(rank=4, alpha=8.0)
LENGTHS = ([5, 1, 7], [3, 4])


def fill(model: torch.nn.Module) -> None:
    """B starts at zero, where the adapter does nothing and A has no gradient: random values in its place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def own(**settings: Any) -> Policy:
    return make_policy(tiny_model(), tiny_processor(), ModelSettings(path="tiny", lora=LORA, **settings))


def of_text(**settings: Any) -> Policy:
    """In a model that reads text alone."""
    return make_policy(tiny_model("qwen2"), tiny_processor("qwen2"), ModelSettings(path="tiny", lora=LORA, **settings))


def by_peft(**settings: Any) -> Policy:
    """A PeftModel that the user made."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets = rf".*language_model\.layers\.\d+\.\w+\.({'|'.join(names)})"
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    return make_policy(model, tiny_processor(), ModelSettings(path="tiny", **settings))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("make", [own, by_peft, of_text])
def test_grouped_equals_repeated(make: Callable[..., Policy], gradient_checkpointing: bool) -> None:
    policy = make(gradient_checkpointing=gradient_checkpointing)
    fill(policy.model)
    cases = [make_case(policy, kind, seed) for seed, kind in enumerate(("video", "image"))]
    groups = [random_group(policy, case, lengths, 7) for case, lengths in zip(cases, LENGTHS, strict=True)]
    logprobs = policy.logprobs(groups)
    weighted_sum(logprobs).backward()
    plain = tiny_model(policy.family.model_type)
    add_lora(plain, LORA)
    plain.load_state_dict(policy.model.state_dict())
    plain.set_attn_implementation("sdpa")
    expected = [repeated_logprobs(plain, case, group.responses) for case, group in zip(cases, groups, strict=True)]
    weighted_sum(expected).backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    errors = gradient_errors(policy.model, plain)
    # Two layers of seven linear layers, each with an A and a B; nothing else trains, not even in the vision tower.
    assert len(errors) == 2 * 7 * 2 and max(errors.values()) <= 1e-4
    trained = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert trained.keys() == errors.keys() and all(gradient.norm() > 0 for gradient in trained.values())
    assert all(".lora_" in name and "visual" not in name for name in errors)


def test_the_reference_is_the_model_without_its_adapter() -> None:
    policy = own()
    case = make_case(policy, "video", 0)
    groups = [random_group(policy, case, [4, 6], 1)]
    before = policy.logprobs(groups)[0]  # B is zero
    fill(policy.model)
    adapted = policy.logprobs(groups)[0]
    reference = AdapterFreeReference(policy).logprobs(groups)[0]
    for i in range(2):
        assert torch.equal(reference[i], before[i].detach())
        assert not reference[i].requires_grad
        assert (adapted[i] - before[i]).abs().max() > 1e-2
    # It is on again, and trains.
    assert torch.equal(policy.logprobs(groups)[0][0], adapted[0])
    assert all(p.requires_grad for p in adapter_parameters(policy.model))


def test_a_new_adapter_is_the_same_whatever_was_drawn_before() -> None:
    first = {name: p.clone() for name, p in own().model.named_parameters() if ".lora_A" in name}
    torch.rand(7)
    state = torch.get_rng_state()
    second = dict(own().model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Policy, Path]:
    """A policy whose base lies on disk, and the folder of its adapter."""
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_processor().save_pretrained(tmp_path / "base")
    policy = load_policy(tmp_path / "base", device="cpu", settings=ModelSettings(path="", lora=LORA))
    fill(policy.model)
    policy.model.save_pretrained(tmp_path / "adapter")
    return policy, tmp_path / "adapter"


def test_a_saved_adapter_is_small_and_loads_with_peft_and_with_us(saved: tuple[Policy, Path]) -> None:
    policy, folder = saved
    assert not list(folder.glob("model*.safetensors"))
    case = make_case(policy, "image", 0)
    group = random_group(policy, case, [4], 1)
    expected = policy.logprobs([group])[0][0]
    by_peft_itself = peft.PeftModel.from_pretrained(tiny_model(), str(folder))
    torch.testing.assert_close(repeated_logprobs(by_peft_itself, case, group.responses)[0], expected)
    frozen = load_policy(folder, device="cpu")
    assert torch.equal(frozen.logprobs([group])[0][0], expected)
    assert not any(p.requires_grad for p in frozen.model.parameters())
    trained = load_policy(folder, device="cpu", settings=ModelSettings(path="", lora=LORA))
    assert torch.equal(trained.logprobs([group])[0][0], expected)
    trainable = {id(p) for p in trained.model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in adapter_parameters(trained.model)}


@pytest.mark.parametrize(
    "settings, message",
    [
        (LoraSettings(rank=8, alpha=8.0), r"names or shapes differ: .* Use the model.lora settings"),
        (LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj",)), "names or shapes differ"),
        (LoraSettings(rank=4, alpha=32.0), r"lora_alpha=8\.0"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    settings: LoraSettings, message: str, saved: tuple[Policy, Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        load_adapter(tiny_model(), saved[1], settings)


@pytest.mark.parametrize("lora", [LORA, None], ids=["trained", "frozen"])
def test_an_adapter_that_is_not_finite_is_refused(saved: tuple[Policy, Path], lora: LoraSettings | None) -> None:
    file = saved[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"infinities in 1 of its weights \(the first is {name} in adapter_model"):
        load_policy(saved[1], device="cpu", settings=ModelSettings(path="", lora=lora))


def test_an_adapter_of_another_kind_is_refused() -> None:
    model = peft.get_peft_model(tiny_model(), peft.LoHaConfig(r=4, target_modules=["q_proj"], rank_dropout=0.5))
    with pytest.raises(ModelError, match="type LOHA; only LORA"):
        make_policy(model, tiny_processor(), ModelSettings(path="tiny"))


def test_only_named_layers_are_adapted() -> None:
    model = tiny_model()
    add_lora(model, LoraSettings(rank=2, target_modules=("q_proj", "down_proj")))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "down_proj"}


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ModelError, match=r"target_modules names qkv; the language model's linear layers are called"):
        add_lora(tiny_model(), LoraSettings(target_modules=("qkv",)))
    with pytest.raises(ModelError, match="has an adapter already"):
        add_lora(own().model, LORA)
    with pytest.raises(ModelError, match="no adapter that could be disabled"), adapter_disabled(tiny_model()):
        pass
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"lora_dropout=0.1; it must be 0"):
        make_policy(peft.get_peft_model(tiny_model(), config), tiny_processor())
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv"])  # qkv is the vision tower's
    with pytest.raises(ModelError, match=r"the tower is trained, but model\.train is \[language\]"):
        make_policy(peft.get_peft_model(tiny_model(), config), tiny_processor())
    with pytest.raises(ValueError, match="dropout cannot differ between them"):
        LoraSettings(dropout=0.1)
    with pytest.raises(ValueError, match=r"model\.train is \[tower, merger, language\]"):
        ModelSettings(path="x", lora=LORA, train=PARTS)
