"""Every option of peft's LoRA: in memory, loaded and merged an adapter gives the log-probabilities, and in memory the
gradients, that peft itself gives on the plain transformers model; or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.groups import Case, make_case, random_group, repeated_logprobs, tiny_policy
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import make_policy
from vlm_pg.models.settings import LoraSettings
from vlm_pg.types import ResponseGroup

peft = pytest.importorskip("peft")

from peft.tuners.lora import config as options  # noqa: E402

from vlm_pg.models.lora import EXACT_FIELDS, adapter_base, adapter_disabled, load_adapter, merge_adapter  # noqa: E402

LAYERS = r".*language_model\.layers\.\d+\..*"
DEFAULTS = {"r": 4, "lora_alpha": 8, "target_modules": LAYERS + "(q_proj|up_proj|down_proj)"}


@dataclass(frozen=True)
class Option:
    """``values`` of a LoraConfig; ``refusal``: what the error says, None where the adapter is computed exactly."""

    values: dict[str, Any]
    refusal: str | None = None
    tied: bool = True


def exact(tied: bool = True, **values: Any) -> Option:
    return Option(values, None, tied)


def refused(**values: Any) -> Option:
    return Option(values, f"has {next(iter(values))}=.*not supported. Train an adapter without it, or merge")


def initialized(how: Any) -> Option:
    return Option({"init_lora_weights": how}, r"init_lora_weights='\w+', which changed the weights of its model")


# A field of a newer peft fails until it has a line here.
OPTIONS: dict[str, list[Option]] = {
    "task_type": [exact(task_type="CAUSAL_LM")],
    "peft_type": [Option({"peft_type": "LOHA"}, "of type LOHA; only LORA is supported")],
    "auto_mapping": [exact(auto_mapping={"base_model_class": "Any"})],
    "peft_version": [exact(peft_version="0.9.0")],
    "base_model_name_or_path": [exact(base_model_name_or_path="/nowhere")],
    "revision": [exact(revision="main")],  # others: test_another_revision_of_the_model_is_refused
    "inference_mode": [exact(inference_mode=True)],
    "r": [exact(r=2)],
    "target_modules": [
        *[exact(tied, target_modules=LAYERS + "q_proj|.*embed_tokens") for tied in (True, False)],
        *[exact(tied, target_modules=LAYERS + "q_proj|lm_head") for tied in (True, False)],
    ],
    "exclude_modules": [exact(exclude_modules=r".*up_proj")],
    "lora_alpha": [exact(lora_alpha=3)],
    "lora_dropout": [Option({"lora_dropout": 0.1}, r"lora_dropout=0.1; it must be 0")],
    "fan_in_fan_out": [exact(fan_in_fan_out=True)],
    "bias": [exact(bias="lora_only")],
    "use_rslora": [exact(use_rslora=True)],
    "modules_to_save": [
        *[exact(tied, modules_to_save=["embed_tokens"]) for tied in (True, False)],
        *[exact(tied, modules_to_save=["lm_head"]) for tied in (True, False)],
        exact(modules_to_save=["embed_tokens", "lm_head"]),
        exact(modules_to_save=["language_model.norm"]),
    ],
    "init_lora_weights": [
        *[exact(init_lora_weights=how) for how in (False, "gaussian", "orthogonal", "eva", "mica", "olora", "pissa")],
        *[initialized(how) for how in ("corda", "lora_ga", "loftq", "pissa_niter_4")],
    ],
    "layers_to_transform": [exact(layers_to_transform=[1], layers_pattern="layers", target_modules=["o_proj"])],
    "layers_pattern": [exact(layers_to_transform=0, layers_pattern=["layers"], target_modules=["o_proj"])],
    "rank_pattern": [exact(rank_pattern={".*q_proj": 2})],
    "alpha_pattern": [exact(alpha_pattern={".*q_proj": 3})],
    "megatron_config": [refused(megatron_config={"tensor_model_parallel_size": 1})],
    "megatron_core": [exact(megatron_core="another.core")],
    "trainable_token_indices": [exact(tied, trainable_token_indices=list(range(300, 400))) for tied in (True, False)],
    "loftq_config": [initialized("loftq")],
    "eva_config": [exact(init_lora_weights="eva", eva_config=options.EvaConfig(rho=2.0))],
    "corda_config": [initialized("corda")],
    "lora_ga_config": [initialized("lora_ga")],
    "use_dora": [exact(use_dora=True), exact(use_dora=True, use_rslora=True)],
    "velora_config": [refused(velora_config=options.VeloraConfig())],
    "alora_invocation_tokens": [refused(alora_invocation_tokens=[7, 8])],
    "use_qalora": [refused(use_qalora=True)],
    "qalora_group_size": [exact(qalora_group_size=8)],
    "monteclora_config": [refused(monteclora_config=options.MontecloraConfig())],
    "layer_replication": [refused(layer_replication=[[0, 2], [1, 2]])],
    "runtime_config": [exact(runtime_config=options.LoraRuntimeConfig(ephemeral_gpu_offload=True))],
    "lora_bias": [exact(lora_bias=True, target_modules=LAYERS + "q_proj")],
    "target_parameters": [exact(target_parameters=["language_model.layers.0.mlp.gate_proj.weight"])],
    "use_bdlora": [refused(use_bdlora=options.BdLoraConfig(target_modules_bd_a=["q_proj"]))],
    "arrow_config": [refused(arrow_config=options.ArrowConfig())],
    "kasa_config": [exact(kasa_config=options.KasaConfig())],
    "ensure_weight_tying": [exact(modules_to_save=["embed_tokens"], ensure_weight_tying=True)],
}


# Besides the first option of each field: initializations that change base weights, and one whose change is lost; an
# untied embedding, and the output head.
USUAL = {("init_lora_weights", 6), ("init_lora_weights", 9), ("modules_to_save", 1), ("modules_to_save", 2)}


def table() -> Iterator[Any]:
    for field in fields(peft.LoraConfig):
        for i, option in enumerate(OPTIONS.get(field.name, [None])):
            marks = (pytest.mark.matrix,) if i > 0 and (field.name, i) not in USUAL else ()
            yield pytest.param(field.name, option, id=f"{field.name}-{i}", marks=marks)


@cache
def plain(tied: bool) -> Any:
    return tiny_model(tie_word_embeddings=tied)


@cache
def probe(tied: bool) -> tuple[Case, ResponseGroup]:
    policy = make_policy(deepcopy(plain(tied)), tiny_processor())
    case = make_case(policy, "image", 0)
    return case, random_group(policy, case, [5, 9], 1)


def adapted(option: Option) -> Any:
    """By peft, with a random adapter."""
    config = peft.LoraConfig(**DEFAULTS | option.values)
    model = peft.get_peft_model(deepcopy(plain(option.tied)), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def ours(model: Any, tied: bool) -> list[torch.Tensor]:
    return make_policy(model, tiny_processor()).logprobs([probe(tied)[1]])[0]


def theirs(model: Any, tied: bool) -> list[torch.Tensor]:
    model.set_attn_implementation("sdpa") if not hasattr(model, "peft_config") else None
    return repeated_logprobs(model, probe(tied)[0], probe(tied)[1].responses)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], atol: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=1e-5)


def gradients(model: Any, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    if not logprobs[0].requires_grad:
        return {}
    sum((i + 1) * x.sum() for i, x in enumerate(logprobs)).backward()  # type: ignore[union-attr]
    named = model.named_parameters()
    return {name.removeprefix("base_model.model."): p.grad for name, p in named if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "option"), list(table()))
def test_an_option_is_exact_or_refused(name: str, option: Option | None, tmp_path: Path) -> None:
    assert option is not None, f"{name} is a new option of peft: classify it above and in vlm_pg/models/lora.py"
    if option.refusal is not None:
        assert_refused(option, tmp_path)
        return
    assert name in EXACT_FIELDS
    reference = adapted(option)
    reference.save_pretrained(tmp_path)
    mine = deepcopy(reference)
    expected = theirs(reference, option.tied)
    without = theirs(deepcopy(plain(option.tied)), option.tied)
    assert (expected[1] - without[1]).abs().max() > 1e-2

    found = ours(mine, option.tied)
    assert_same(found, expected)
    mine_grads, expected_grads = gradients(mine, found), gradients(reference, expected)
    assert mine_grads.keys() == expected_grads.keys()
    for key, gradient in expected_grads.items():
        assert (mine_grads[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, key

    loaded = deepcopy(plain(option.tied))
    load_adapter(loaded, tmp_path, None)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert_same(ours(loaded, option.tied), expected)
    merge_adapter(loaded)
    assert not any("lora" in key or "modules_to_save" in key or "token_adapter" in key for key in loaded.state_dict())
    assert_same(theirs(loaded, option.tied), expected, atol=5e-5)


def load_and_make(model: Any, folder: Path) -> None:
    load_adapter(model, folder, None)
    make_policy(model, tiny_processor())


def assert_refused(option: Option, folder: Path) -> None:
    model = adapted(Option({}))
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    written = {key: asdict(value) if is_dataclass(value) else value for key, value in option.values.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | written))
    loaded = deepcopy(plain(True))
    with pytest.raises(ModelError, match=option.refusal):
        load_and_make(loaded, folder)
    if "init_lora_weights" in option.values:  # in memory it has happened already
        return
    if "lora_dropout" in option.values:
        model = adapted(option)
    for key, value in option.values.items():
        setattr(model.peft_config["default"], key, value)
    with pytest.raises(ModelError, match=option.refusal):
        make_policy(model, tiny_processor())


def test_an_option_that_the_installed_peft_does_not_know_is_refused(tmp_path: Path) -> None:
    """peft itself leaves it out."""
    adapted(Option({})).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"use_novel_lora": True, "another": None}))
    with pytest.raises(
        ModelError, match=r"use_novel_lora=True, which the installed peft .* does not know. Update peft"
    ):
        load_adapter(deepcopy(plain(True)), tmp_path, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "values", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["embed_tokens"]}]
)
def test_what_settings_do_not_describe_trains_on_no_further(values: dict[str, Any], tmp_path: Path) -> None:
    adapted(Option(values)).save_pretrained(tmp_path)
    name = next(iter(values))
    with pytest.raises(ModelError, match=rf"has lora_alpha=8, {name}=.*model.lora describes plain LoRA with alpha=8"):
        load_adapter(deepcopy(plain(True)), tmp_path, LoraSettings(rank=4, alpha=8))


def test_another_revision_of_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"base_model_name_or_path": "Qwen/Any", "revision": "v2"}))
    with pytest.raises(ModelError, match=r"names revision 'v2' of Qwen/Any, but only latest revisions are read"):
        adapter_base(tmp_path)
    path.write_text(json.dumps({"base_model_name_or_path": str(tmp_path), "revision": "v2"}))
    assert adapter_base(tmp_path) == str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_disabled_adapter_leaves_the_model_as_it_was() -> None:
    model = make_policy(adapted(Option({"modules_to_save": ["embed_tokens"]})), tiny_processor()).model
    policy = tiny_policy()
    with adapter_disabled(model):
        assert_same(make_policy(model, tiny_processor()).logprobs([probe(True)[1]])[0], ours(policy.model, True))
    model = make_policy(adapted(Option({"bias": "lora_only"})), tiny_processor()).model
    with pytest.raises(ModelError, match="cannot be disabled: bias=lora_only"), adapter_disabled(model):
        pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "values", [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [301, 303]}]
)
def test_an_adapter_with_the_names_of_an_earlier_transformers_is_the_same(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Up to 4.51 the language model was ``model``, not ``model.language_model``."""
    from safetensors.torch import load_file, save_file

    adapted(Option({"target_modules": ["q_proj", "o_proj"], **values})).save_pretrained(tmp_path)
    new = deepcopy(plain(True))
    load_adapter(new, tmp_path, None)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}, file)
    old = deepcopy(plain(True))
    load_adapter(old, tmp_path, None)
    assert all(torch.equal(a, b) for a, b in zip(old.state_dict().values(), new.state_dict().values(), strict=True))
    if not values:
        trained = deepcopy(plain(True))
        load_adapter(trained, tmp_path, LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "o_proj")))
        assert all(torch.equal(a, new.state_dict()[name]) for name, a in trained.state_dict().items())


def test_an_adapter_in_a_pickled_file_is_the_same(tmp_path: Path) -> None:
    model = adapted(Option({}))
    model.save_pretrained(tmp_path, safe_serialization=True)
    first, second = deepcopy(plain(True)), deepcopy(plain(True))
    load_adapter(first, tmp_path, None)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(peft.get_peft_model_state_dict(model), tmp_path / "adapter_model.bin")
    load_adapter(second, tmp_path, None)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_tensor_that_does_not_arrive_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(Option({})).save_pretrained(tmp_path)
    monkeypatch.setattr(peft, "set_peft_model_state_dict", lambda model, tensors: None)
    with pytest.raises(ModelError, match=r"12 tensors of the adapter .* did not arrive in the model"):
        load_adapter(deepcopy(plain(True)), tmp_path, None)
