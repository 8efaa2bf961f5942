"""Adapters beside weights in 4 bits: shared equals repeated, and both are what the written-out weights give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.groups import check_equal, gradient_errors, outcome, random_groups, tiny_policy, weighted_sum
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import load_policy, make_policy
from vlm_pg.models.lora import add_lora
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import load_reference
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.models.weights import BYTES_PER_WEIGHT, is_quantized, num_elements
from vlm_pg.plan.shape import shape_of
from vlm_pg.types import ResponseGroup
from vlm_pg.verify.sides import errors, repeated_backward, run_side, shared_backward

QLORA = LoraSettings(rank=4, alpha=8.0, quantize="nf4")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"needs the package bitsandbytes.*pip install 'vlm-pg\[qlora\]'"):
        tiny_policy(lora=QLORA)


@pytest.fixture
def bnb() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")


def fill(policy: Policy) -> Policy:
    """B starts at zero, where the adapter does nothing and A has no gradient: random values in its place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
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
    oracle = fill(tiny_policy(family=policy.family.model_type, lora=QLORA.model_copy(update={"quantize": None})))
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
    policy = fill(tiny_policy(family=family, lora=QLORA, gradient_checkpointing=True))
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
    policy = fill(tiny_policy(lora=QLORA))
    groups = groups_of(policy)
    fresh = tiny_policy(lora=QLORA)  # its B is zero
    with torch.no_grad():
        expected, adapted = fresh.logprobs(groups), policy.logprobs(groups)
    found = load_reference(policy.settings, policy).logprobs(groups, temperature=1.0)
    for ours, theirs, other in zip(flat(found), flat(expected), flat(adapted), strict=True):
        assert (ours - theirs).abs().max() < 1e-6 and (ours - other).abs().max() > 1e-4


@pytest.mark.usefixtures("bnb")
def test_in_bf16_adapters_are_bf16_and_errors_are_those_of_repeating() -> None:
    policy = fill(tiny_policy(dtype=torch.bfloat16, lora=QLORA))
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
