"""Products of layers with one input, packed into one: their values, their weights, and how many a step has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.groups import make_case, random_group, tiny_policy, weighted_sum
from tests.support.tiny import FAMILY_NAMES
from tests.unit.rollout.test_recordable import recorded_step
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings
from vlm_pg.rollout.fused.choice import fused_unchecked
from vlm_pg.rollout.fused.packed import PackedLinears, packed_linears
from vlm_pg.rollout.merged import adapter_merged
from vlm_pg.rollout.settings import RolloutSettings

# One of each kind of layers.
ADAPTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def packed(policy: Policy) -> list[PackedLinears]:
    found, _ = packed_linears(policy.language_model)
    for one in found:
        one.pack()
    return found


def called(one: PackedLinears, x: torch.Tensor) -> list[torch.Tensor]:
    return [forward(x) for _, forward in one.forwards()]


def num_products(operators: list[str]) -> int:
    return operators.count("aten::mm") + operators.count("aten::addmm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ADAPTED)
@torch.no_grad()
def test_parts_of_one_product_are_the_products(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family=family, dtype=dtype)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    found, apart = packed_linears(policy.language_model)
    groups = [[layer for layer, _ in one.forwards()] for one in found]
    kinds = policy.family.layer_kinds(policy.model.config)
    gates = sum(hasattr(module, "gate_proj") for module in policy.language_model.modules())
    assert len(groups) == len(kinds) + gates and apart is None
    x = torch.randn(1, 5, policy.model.config.get_text_config().hidden_size).to(dtype)
    expected = [[layer(x) for layer in layers] for layers in groups]
    for one, products in zip(packed(policy), expected, strict=True):
        for got, product in zip(called(one, x), products, strict=True):
            assert (got - product).abs().max() <= 4 * torch.finfo(dtype).eps * product.abs().max()
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, before[name]) and weight.is_contiguous(), name


@torch.no_grad()
def test_another_input_is_computed_alone() -> None:
    policy = tiny_policy()
    one = packed(policy)[0]
    (_, q_forward), (k, k_forward), (v, v_forward) = one.forwards()
    x, y = torch.randn(2, 1, 3, 64).unbind()
    q_forward(x)
    assert torch.equal(k_forward(y), k(y)), "not of x"
    torch.testing.assert_close(k_forward(x), k(x))
    assert torch.equal(k_forward(x.clone()), k(x)) and torch.equal(k_forward(x), k(x)), "used once"
    torch.testing.assert_close(v_forward(x), v(x))
    assert one._input is None, "nothing is held"


@pytest.mark.parametrize(
    "family, lora",
    [
        pytest.param(family, lora, marks=() if lora and family in ("qwen2_5_vl", "qwen3_5") else pytest.mark.matrix)
        for family in FAMILY_NAMES
        for lora in (None, LoraSettings(rank=4))
    ],
)
def test_a_layer_has_four_products(family: str, lora: LoraSettings | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    policy = tiny_policy(family=family, dtype=torch.bfloat16, lora=lora)
    monkeypatch.setattr("vlm_pg.rollout.merged.free_bytes", lambda _: 2**40)
    merged = partial(adapter_merged, settings=RolloutSettings(), largest_group=lambda: 0)
    operators = recorded_step(policy, monkeypatch, fused=True, within=merged)
    kinds = policy.family.layer_kinds(policy.model.config)
    dense = 4 * len(kinds)
    if policy.family.moe:
        # Routers, and with Qwen3.5's shared expert its two and its gate; experts are grouped products.
        dense = (6 if "qwen3_5" in family else 3) * len(kinds)
    assert num_products(operators) == dense
    assert num_products(recorded_step(policy, monkeypatch)) > dense, "products of their own, and of the adapter"


def test_packed_weights_train() -> None:
    policy = tiny_policy()
    group = random_group(policy, make_case(policy, "text", 0), [3, 4], 0)
    pack, x = packed(policy)[0], torch.randn(1, 2, 64)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    before = [part.clone() for part in called(pack, x)]
    weighted_sum(policy.logprobs([group])).backward()
    optimizer.step()
    pack.pack()
    for got, old, (layer, _) in zip(called(pack, x), before, pack.forwards(), strict=True):
        torch.testing.assert_close(got, layer(x))
        assert (got - old).abs().max() > 0.1, "an update is seen"
    assert pack._weight is not None
    weights = [layer.weight for layer, _ in pack.forwards()]
    assert {w.untyped_storage().data_ptr() for w in weights} == {pack._weight.untyped_storage().data_ptr()}


def test_packed_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    policy, other = tiny_policy(), tiny_policy()
    for weight in policy.parameters():
        torch.nn.init.normal_(weight)
    expected = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    packed(policy), packed(other)
    policy.model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.1 * sum(weight.nbytes for weight in found.values()), "each weight once"
    torch.save(policy.model.state_dict(), tmp_path / "state.pt")
    other.model.load_state_dict(torch.load(tmp_path / "state.pt"))
    reloaded = type(policy.model).from_pretrained(tmp_path).state_dict()
    for name, weight in expected.items():
        assert torch.equal(other.model.state_dict()[name], weight) and torch.equal(reloaded[name], weight)
    for one in packed(other):
        torch.testing.assert_close(called(one, torch.ones(1, 2, 64))[-1], one._layers[-1](torch.ones(1, 2, 64)))


def test_weights_that_have_moved_are_packed_again() -> None:
    policy = tiny_policy()
    packed(policy)
    policy.to(torch.float64)
    x = torch.randn(1, 2, 64, dtype=torch.float64)
    one = packed(policy)[0]
    torch.testing.assert_close(called(one, x), [layer(x) for layer, _ in one.forwards()])


def test_weights_in_a_flat_buffer_stay_there() -> None:
    """As DeepSpeed's stages 1 and 2 lay them out: neighbours are one product, others stay apart."""
    policy = tiny_policy()
    weights: list[Any] = list(policy.language_model.layers[0].parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view_as(weight)
    before, mlp = [weight.data_ptr() for weight in weights], policy.language_model.layers[0].mlp
    assert packed_linears(policy.language_model)[1] == (
        "q_proj, k_proj, v_proj separate: their weights are parts of a buffer, in which others lie between them"
    )
    assert fused_unchecked(policy).name == f"triton ({packed_linears(policy.language_model)[1]})"
    first = packed(policy)[0]
    assert [layer for layer, _ in first.forwards()] == [mlp.gate_proj, mlp.up_proj]
    assert first._weight is not None and first._weight.untyped_storage().data_ptr() == flat.data_ptr()
    assert [weight.data_ptr() for weight in weights] == before


def test_layers_of_other_kinds_stay_apart() -> None:
    policy = tiny_policy()
    attention, mlp = policy.language_model.layers[0].self_attn, policy.language_model.layers[0].mlp
    attention.q_proj.forward = attention.q_proj.forward
    mlp.up_proj = torch.nn.utils.parametrizations.weight_norm(mlp.up_proj)
    assert packed_linears(policy.language_model)[1] == (
        "q_proj, k_proj, v_proj separate: one has a forward of its own; "
        "gate_proj, up_proj separate: one is a ParametrizedLinear"
    )
