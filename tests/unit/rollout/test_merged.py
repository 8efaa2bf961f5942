"""An adapter merged for a generation: the same policy up to rounding, and afterwards every bit as it was."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, random_group, tiny_policy
from tests.unit.rollout.test_packed import called, packed
from tests.unit.rollout.test_ragged import record_steps
from vlm_pg.errors import ConfigError, ModelError
from vlm_pg.memory import GIB
from vlm_pg.models.lora import adapter_disabled
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import AdapterFreeReference
from vlm_pg.models.settings import LoraSettings
from vlm_pg.rollout import merged
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.fused.packed import packed_linears
from vlm_pg.rollout.merged import adapter_line, adapter_merged, mergeable_layers
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Rollout

pytest.importorskip("peft")

LORA = LoraSettings(rank=4, alpha=8.0)
ON, OFF = RolloutSettings(merge_adapter=True), RolloutSettings(merge_adapter=False)


def adapted(lora: LoraSettings = LORA, **settings: Any) -> Policy:
    """B starts at zero: random values in its place."""
    policy = tiny_policy(lora=lora, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def prompts_of(policy: Policy) -> list[Prompt]:
    return [make_case(policy, kind, seed).prompt for seed, kind in enumerate(("text", "image", "text"))]


def sampled(policy: Policy, merge: bool | str, **settings: Any) -> list[Rollout]:
    given = {"num_generations": 3, "max_new_tokens": 12, "temperature": 0.0} | settings
    engine = RolloutEngine(policy, RolloutSettings(merge_adapter=merge, **given), seed=0)
    return [rollout for group in engine.generate(prompts_of(policy), 1) for rollout in group]


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def is_as(policy: Policy, before: dict[str, torch.Tensor]) -> bool:
    names = dict(policy.named_parameters())
    return names.keys() == before.keys() and all(torch.equal(weight, before[name]) for name, weight in names.items())


def flags(policy: Policy) -> set[bool]:
    return {module.merged for module in policy.model.modules() if hasattr(module, "merged_adapters")}


@pytest.mark.parametrize(
    "family, lora",
    [
        *((family, LORA) for family in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")),
        ("qwen2_5_vl", LORA.model_copy(update={"target_modules": ("q_proj", "down_proj")})),
        *(pytest.param(family, LORA, marks=pytest.mark.matrix) for family in ("qwen3_5_moe", "qwen3")),
    ],
)
def test_the_same_answers(family: str, lora: LoraSettings) -> None:
    policy = adapted(lora, family=family)
    before = weights_of(policy)
    beside, inside = sampled(policy, False), sampled(policy, True)
    for one, other in zip(beside, inside, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(a.rollout_logprobs, b.rollout_logprobs) for a, b in zip(beside, inside, strict=True))
    assert is_as(policy, before) and flags(policy) == {False}


@pytest.mark.parametrize("fault", [RuntimeError, InterruptedError])
def test_weights_are_restored_behind_an_error(fault: type[BaseException]) -> None:
    """Prefill and steps read merged weights; whatever ends a generation, the weights are what they were."""
    policy = adapted(dtype=torch.bfloat16)
    before, polled = weights_of(policy), 0

    def stop() -> bool:
        nonlocal polled
        polled += 1
        assert flags(policy) == {True}
        changed = {name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])}
        assert changed == {name for name in before if ".base_layer.weight" in name}
        if polled == 8 and fault is not InterruptedError:
            raise fault
        return polled == 8

    engine = RolloutEngine(policy, RolloutSettings(merge_adapter=True, max_new_tokens=12), 0, stop)
    with pytest.raises(fault):
        engine.generate(prompts_of(policy), 1)
    assert is_as(policy, before) and flags(policy) == {False}


def test_half_a_merge_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted()
    before, add, left = weights_of(policy), merged._add_adapters, 5

    def fails(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        add(*arguments)
        if not left:
            raise MemoryError

    monkeypatch.setattr(merged, "_add_adapters", fails)
    with pytest.raises(MemoryError):
        sampled(policy, True)
    assert is_as(policy, before) and flags(policy) == {False}


@pytest.mark.parametrize("rows", [2**25, 100])
@torch.no_grad()
def test_what_is_added_is_rounded_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Two adapters at work; in blocks of rows as well. Behind a packing the weights stay where they are."""
    import peft

    monkeypatch.setattr(merged, "_CHUNK", rows)
    policy = adapted(dtype=torch.bfloat16)
    policy.model.add_adapter(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["v_proj"]), "second")
    policy.model.set_adapter(["default", "second"])
    for name, weight in policy.model.named_parameters():
        if ".second." in name:
            weight.data = torch.randn_like(weight).bfloat16()
    before, packs = weights_of(policy), packed(policy)
    layer: Any = policy.language_model.layers[0].self_attn.v_proj
    exact, where = layer.base_layer.weight.double(), layer.base_layer.weight.data_ptr()
    for name, scale in (("default", 2.0), ("second", 3.0)):
        exact += scale * layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double()
    x = torch.randn(1, 3, 64).bfloat16()
    with adapter_merged(policy, ON, lambda: 0):
        got = layer.base_layer.weight
        assert (got.double() - exact).abs().max() <= 1.001 * 2**-8 * exact.abs().max()
        assert ((got.double() - exact).abs() <= 1.001 * 2**-8 * exact.abs() + 1e-6).all()
        attention: Any = policy.language_model.layers[0].self_attn
        products = called(packs[0], x)
        for product, one in zip(products, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True):
            torch.testing.assert_close(product, one(x))
        packs = packed(policy)
        assert got.data_ptr() == where
    assert is_as(policy, before) and layer.base_layer.weight.data_ptr() == where


@torch.no_grad()
def test_the_reference_never_sees_them() -> None:
    policy = adapted()
    group = random_group(policy, make_case(policy, "text", 0), [4, 5], 0)
    reference = AdapterFreeReference(policy)
    before = reference.logprobs([group])[0]
    sampled(policy, True)
    for one, other in zip(before, reference.logprobs([group])[0], strict=True):
        assert torch.equal(one, other)
    with adapter_merged(policy, ON, lambda: 0), pytest.raises(ModelError, match="merged into the weights"):
        reference.logprobs([group])


def test_where_it_is_merged() -> None:
    policy: Any = adapted()
    layers = 7 * len(policy.language_model.layers)
    assert [len(mergeable_layers(policy, settings)[0]) for settings in (ON, OFF, RolloutSettings())] == [layers, 0, 0]
    assert adapter_line(policy, RolloutSettings()) == "not merged (the model is on cpu)"
    assert adapter_line(policy, OFF) == "not merged (rollout.merge_adapter is false)"
    assert adapter_line(policy, ON) == f"merged into {layers} layers for each generation where memory allows"
    assert adapter_line(tiny_policy(), ON) is None
    with adapter_disabled(policy.model):
        assert mergeable_layers(policy, ON) == ([], None)
    next(iter(policy.language_model.parameters())).ds_id = 0
    with pytest.raises(ConfigError, match=r"merge_adapter is true.*\(weights are scattered over ranks\)\. Set"):
        adapter_line(policy, ON)


@pytest.mark.parametrize(
    "options, reason, merged_layers",
    [
        ({"use_dora": True}, "not 14: a variant of LoRA such as DoRA", 0),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "not 2: lora_bias", 0),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "not 1: Embedding of Embedding", 2),
    ],
)
def test_unusual_adapters_stay_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str, merged_layers: int
) -> None:
    import peft

    policy = tiny_policy()
    policy.requires_grad_(False)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    given = {"r": 2, "target_modules": names} | options
    given["target_modules"] = rf".*language_model\.(.*\.)?({'|'.join(given['target_modules'])})"
    policy.model.add_adapter(peft.LoraConfig(**given))
    with pytest.raises(ConfigError, match=reason):
        sampled(policy, True)
    for name, weight in policy.model.named_parameters():
        if ".lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(weight, std=0.1)
    expected = sampled(policy, False)
    monkeypatch.setattr(merged, "_off_because", lambda *_: None)
    layers, because = mergeable_layers(policy, RolloutSettings())
    assert (len(layers), because) == (merged_layers, reason)
    for one, other in zip(sampled(policy, "auto"), expected, strict=True):
        torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5, rtol=1e-5)


def test_where_the_weights_are_backed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda": 60 * GIB, "cpu": 60 * GIB}
    monkeypatch.setattr(merged, "free_bytes", lambda device: free[device.type])
    device = torch.device("cuda")

    def backup(needed: float, group: float, copies: bool = False, **settings: Any) -> int:
        return merged._backup(device, RolloutSettings(**settings), int(needed * GIB), int(group * GIB), copies)

    nowhere, host, on_device = range(3)
    assert backup(14, 20) == on_device
    assert backup(14, 28) == host, "60 % of what is left are less than one group takes"
    assert backup(14, 28, copies=True) == nowhere
    assert backup(31, 1) == nowhere, "two times 31 are more than either has"
    assert backup(29.9, 1) == host
    assert backup(14, 50, memory_gb=40.0) == on_device and backup(14, 1, memory_gb=46.0) == host


def test_without_memory_it_stays_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, expected = adapted(), sampled(adapted(), False)
    monkeypatch.setattr(merged, "_backup", lambda *_: 0)
    with pytest.raises(ConfigError, match=r"GiB for merging the adapter do not fit.*merge_adapter=auto"):
        sampled(policy, True)
    monkeypatch.setattr(merged, "_off_because", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        found = sampled(policy, "auto")
    assert "do not fit beside generation's keys and values: every token pays" in caplog.text
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_layers_in_4_bits_are_written_out_for_a_generation(targets: tuple[str, ...]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    policy = adapted(LORA.model_copy(update={"quantize": "nf4", "target_modules": targets}))

    def small() -> list[Any]:
        return [m for m in policy.model.modules() if isinstance(m, bnb.nn.Linear4bit)]

    before, layers = weights_of(policy), small()
    assert "gate_proj, up_proj separate: in 4 bits, unless" in str(packed_linears(policy.language_model)[1])
    beside, inside = sampled(policy, False), sampled(policy, True)
    for one, other in zip(beside, inside, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5, rtol=1e-5)
    with adapter_merged(policy, ON, lambda: 0):
        assert small() == [] and flags(policy) == {True}
        assert len(packed(policy)) == 2 * len(policy.language_model.layers)
    assert small() == layers and is_as(policy, before) and flags(policy) == {False}


@pytest.mark.parametrize("lora", [LORA, LORA.model_copy(update={"quantize": "nf4"})], ids=["plain", "4 bits"])
def test_recorded_steps_are_of_use_while_adapters_are_as_they_were(
    monkeypatch: pytest.MonkeyPatch, lora: LoraSettings
) -> None:
    """One that was recorded with the adapter merged has no products of it, and reads weights that may be gone."""
    if lora.quantize:
        pytest.importorskip("bitsandbytes")
    policy = adapted(lora)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    record_steps(policy, monkeypatch)
    engine = RolloutEngine(policy, RolloutSettings(merge_adapter=True, num_generations=2, max_new_tokens=20), 0)
    expected = engine.generate(prompts_of(policy), 1)
    decoder = engine._decoder
    if lora.quantize:
        assert decoder is None
        return
    with adapter_merged(policy, ON, lambda: 0):
        assert decoder is not None and decoder.is_current()
    assert not decoder.is_current()
    for ours, others in zip(engine.generate(prompts_of(policy), 1), expected, strict=True):
        assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(ours, others, strict=True))
    assert engine._decoder is decoder
    monkeypatch.setattr(merged, "_off_because", lambda *_: "not now")
    engine.settings = engine.settings.model_copy(update={"merge_adapter": "auto"})
    for ours, others in zip(engine.generate(prompts_of(policy), 1), expected, strict=True):
        assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(ours, others, strict=True))
    assert engine._decoder is not decoder
