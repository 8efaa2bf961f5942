"""Grouped with an adapter equals repeated with the same adapter: values and the gradient of every A and B."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.groups import (
    check_equal,
    gradient_errors,
    make_case,
    outcome,
    random_group,
    random_groups,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import load_policy, make_policy
from vlm_pg.models.lora import adapter_disabled, adapter_parameters, add_lora, load_adapter
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import AdapterFreeReference, load_reference
from vlm_pg.models.settings import PARTS, LoraSettings, ModelSettings
from vlm_pg.models.weights import BYTES_PER_WEIGHT, is_quantized, num_elements
from vlm_pg.plan.shape import shape_of
from vlm_pg.types import ResponseGroup
from vlm_pg.verify.sides import errors, repeated_backward, run_side, shared_backward

peft = pytest.importorskip("peft")


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


QLORA = LoraSettings(rank=4, alpha=8.0, quantize="nf4")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"needs the package bitsandbytes.*pip install 'vlm-pg\[qlora\]'"):
        tiny_policy(lora=QLORA)


@pytest.fixture
def bnb() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")


def filled(policy: Policy) -> Policy:
    fill(policy.model)
    return policy


def groups_of(policy: Policy) -> list[ResponseGroup]:
    return random_groups(policy, (("video", [5, 1, 7]), ("text", [3, 4]), ("image", [6, 2])))


def flat(logprobs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [response for group in logprobs for response in group]


def written_out(policy: Policy) -> dict[str, torch.Tensor]:
    """By full name, all weights as they are computed with."""
    from bitsandbytes.functional import dequantize_4bit

    return {
        name: dequantize_4bit(weight.data, weight.quant_state) if is_quantized(weight) else weight
        for name, weight in policy.model.named_parameters()
    }


def on_plain_layers(policy: Policy) -> Policy:
    """The same adapter beside the dequantized weights."""
    oracle = filled(tiny_policy(family=policy.family.model_type, lora=QLORA.model_copy(update={"quantize": None})))
    plain = dict(oracle.model.named_parameters())
    with torch.no_grad():
        for name, value in written_out(policy).items():
            plain[name].copy_(value)
    return oracle


@pytest.mark.usefixtures("bnb")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "qwen3"])
def test_which_weights_are_in_4_bits(family: str) -> None:
    """The language model's linear layers, adapted or not: no expert, norm, embedding or head, nothing visual."""
    lora = QLORA.model_copy(update={"target_modules": ("q_proj",)})
    policy = tiny_policy(family=family, lora=lora)
    before, whole = tiny_model(family), 0
    expected = set(policy.family.quantizable_layers(before))
    small = {name for name, weight in policy.model.named_parameters() if is_quantized(weight)}
    assert {name.removesuffix(".weight").removesuffix(".base_layer") for name in small} == expected
    assert not any(part in name for name in small for part in ("visual", "norm", "embed", "lm_head", "expert_gate"))
    linear = {n for n, module in before.named_modules() if isinstance(module, torch.nn.Linear)}
    left = {name.rpartition(".")[2] for name in linear - expected if "visual" not in name}
    assert left <= {"lm_head", "shared_expert_gate"}
    for name, weight in policy.model.named_parameters():
        assert weight.requires_grad == (".lora_" in name)
        if is_quantized(weight):
            assert weight.dtype == torch.uint8 and 2 * weight.numel() == num_elements(weight)
        whole += 0 if ".lora_" in name else num_elements(weight)
    assert whole == sum(p.numel() for p in before.parameters())
    weights = shape_of(before.config, ModelSettings(path="tiny")).weights
    assert weights.linear == sum(num_elements(p) for p in policy.model.parameters() if is_quantized(p))


@pytest.mark.usefixtures("bnb")
def test_bytes_of_a_weight() -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(1024, 1024), compress_statistics=True, quant_type="nf4")
    stored = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert stored / 1024**2 == BYTES_PER_WEIGHT


@pytest.mark.usefixtures("bnb")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_they_are_what_transformers_would_make_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    save_tiny_model(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["model.visual", "lm_head"],
    )
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype, quantization_config=config)
    ours = load_policy(tmp_path, dtype, "cpu", ModelSettings(path=str(tmp_path), lora=QLORA))
    expected = {name: weight for name, weight in theirs.named_parameters() if is_quantized(weight)}
    found = {n.replace(".base_layer", ""): w for n, w in ours.model.named_parameters() if is_quantized(w)}
    assert found.keys() == expected.keys() and len(found) == 14
    for name, weight in found.items():
        assert torch.equal(weight.data, expected[name].data), name
    original = dict(tiny_model().to(dtype).named_parameters())
    values = {name.replace(".base_layer", ""): value.detach() for name, value in written_out(ours).items()}
    for name, weight in original.items():
        apart = float((values[name] - weight.detach()).float().norm() / weight.detach().float().norm().clamp_min(1e-9))
        assert 0.05 < apart < 0.12 if name in found else apart == 0, (name, "4 bits are some 9 % away")


@pytest.mark.usefixtures("bnb")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_values_and_gradients_are_those_of_the_weights_written_out(family: str) -> None:
    """The oracle has the same adapter on plain layers; chunked and recomputed as well."""
    policy = filled(tiny_policy(family=family, lora=QLORA, gradient_checkpointing=True))
    oracle = on_plain_layers(policy)
    groups = groups_of(policy)
    expected = oracle.logprobs(groups)
    weighted_sum(expected).backward()
    logprobs = policy.logprobs(groups)
    weighted_sum(logprobs).backward()
    for ours, theirs in zip(flat(logprobs), flat(expected), strict=True):
        assert (ours - theirs).abs().max() < 1e-5
    assert max(gradient_errors(policy.model, oracle.model).values()) < 1e-4

    check_equal(outcome(policy, groups, 8), outcome(oracle, groups, None), 1e-4)


@pytest.mark.usefixtures("bnb")
def test_the_reference_is_the_model_in_4_bits_without_the_adapter() -> None:
    policy = filled(tiny_policy(lora=QLORA))
    groups = groups_of(policy)
    fresh = tiny_policy(lora=QLORA)  # its B is zero
    with torch.no_grad():
        expected, adapted = fresh.logprobs(groups), policy.logprobs(groups)
    found = load_reference(policy.settings, policy).logprobs(groups, temperature=1.0)
    for ours, theirs, other in zip(flat(found), flat(expected), flat(adapted), strict=True):
        assert (ours - theirs).abs().max() < 1e-6 and (ours - other).abs().max() > 1e-4


@pytest.mark.usefixtures("bnb")
def test_in_bf16_adapters_are_bf16_and_errors_are_those_of_repeating() -> None:
    policy = filled(tiny_policy(dtype=torch.bfloat16, lora=QLORA))
    assert {p.dtype for n, p in policy.model.named_parameters() if ".lora_" in n} == {torch.bfloat16}
    exact = on_plain_layers(policy)
    groups = groups_of(policy)
    reference = run_side(exact, groups, repeated_backward).values
    shared = errors(run_side(policy, groups, shared_backward(10_000)).values, reference)
    repeated = errors(run_side(policy, groups, repeated_backward).values, reference)
    assert shared.logprob_rms < 2 * repeated.logprob_rms and shared.gradient < 2 * repeated.gradient


@pytest.mark.usefixtures("bnb")
def test_a_model_with_an_adapter_of_its_own_is_refused() -> None:
    model = tiny_model()
    add_lora(model, LoraSettings(rank=4))
    with pytest.raises(ModelError, match=r"model\.lora\.quantize is set, but the model has an adapter already"):
        make_policy(model, None, ModelSettings(path="tiny", lora=QLORA))
