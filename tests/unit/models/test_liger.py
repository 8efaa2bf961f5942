"""liger-kernel's operators take the place of transformers' code in one model's layers, give the same numbers, and are
refused with a reason where they cannot work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch

from scripts.bench.counting import fake_mode, fake_policy
from tests.support.runs import ROOT
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.bench.case import text_prompt
from vlm_pg.errors import ModelError
from vlm_pg.models.layer_globals import layer_global, replaced_globals, set_layer_globals
from vlm_pg.models.liger import Liger, apply_liger, liger_line, liger_of
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings, Switch
from vlm_pg.types import ResponseGroup


def test_a_model_that_is_not_on_a_gpu() -> None:
    with pytest.raises(ModelError, match=r"need a GPU and the model is on cpu"):
        make_policy(tiny_model(), tiny_processor(), ModelSettings(path="tiny", liger=True))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    monkeypatch.delitem(sys.modules, "vlm_pg.models.liger_layers", raising=False)
    monkeypatch.delattr("vlm_pg.models.liger_layers", raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(ModelError, match=r"model.liger is true, but .* pip install 'vlm-pg\[liger\]', or set"):
        apply_liger(tiny_model(), True)
    model = tiny_model()
    apply_liger(model, "auto")
    assert not liger_of(model).parts and "forward" not in vars(model.model.language_model.norm)
    line = str(liger_line(model))
    assert line.startswith(
        "liger-kernel: all layers by transformers: the package liger-kernel is not installed, or not"
    )
    assert line.endswith("Install it with pip install 'vlm-pg[liger]'")


def test_a_family_it_knows_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    model = tiny_model()
    model.config.model_type = "qwen9_vl"
    with pytest.raises(ModelError, match="nothing for model type 'qwen9_vl'"):
        apply_liger(model, True)
    on_gpu(monkeypatch)
    apply_liger(model, "auto")
    assert "all layers by transformers: liger-kernel has nothing for model type 'qwen9_vl'" in str(liger_line(model))


def test_a_model_without_a_part_that_its_family_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers that names its modules otherwise: an error, not skipped."""
    pytest.importorskip("liger_kernel")
    on_gpu(monkeypatch)
    monkeypatch.setattr("vlm_pg.models.liger_layers.ROTATIONS", {"apply_rope": None})
    with pytest.raises(ModelError, match="has nothing that liger-kernel's rotary positions could stand in for"):
        apply_liger(tiny_model(), True)


@pytest.mark.parametrize("switch", ["auto", False])
def test_on_a_cpu_nothing_changes(switch: Switch) -> None:
    assert ModelSettings(path="tiny").liger == "auto"
    model = make_policy(tiny_model(), tiny_processor(), ModelSettings(path="tiny", liger=switch)).model
    for module in model.model.modules():
        assert "forward" not in vars(module) or not type(module).__name__.endswith(("Norm", "MLP", "Experts"))
        assert not [name for name in replaced_globals(module) if name.startswith("apply_rotary")]
    assert liger_of(model) == Liger() and liger_line(model) is None


CORRECT = "liger-kernel: RMSNorm, SwiGLU, rotary positions (not its losses)"


@pytest.mark.parametrize("wrong", ["", "output", "gradient", "dtype"])
@pytest.mark.parametrize("part, name", [("rms_norm", "RMSNorm"), ("swiglu", "SwiGLU"), ("rope", "rotary positions")])
def test_each_part_is_judged_alone(part: str, name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is pretended: by outputs and by gradients; what is refused stays transformers' own."""
    dtype = torch.float32 if part == "rope" else torch.bfloat16
    model, beside = tiny_model().to(dtype), tiny_model().to(dtype)
    layers = pretend_kernels(model, monkeypatch)
    if part == "rope":
        replaced = {key: spoilt(by, wrong) for key, by in layers.ROTATIONS.items()}
        monkeypatch.setattr(layers, "ROTATIONS", replaced)
    else:
        fits, forward = layers.FORWARDS[part]
        monkeypatch.setitem(layers.FORWARDS, part, (fits, spoilt(forward, wrong)))
    apply_liger(model, "auto")
    line, found = str(liger_line(model)), liger_of(model)
    if not wrong:
        assert line == CORRECT and found == Liger(("rms_norm", "swiglu", "rope"))
    else:
        others = {"RMSNorm", "SwiGLU", "rotary positions"} - {name}
        assert set(found.others) == {name} and all(other in line.split("(")[0] for other in others)
        assert f"; {name} by transformers: " in line
        assert re.search("gradient of" if wrong == "gradient" else "output is", found.others[name]), line
        assert ("is torch." in line) == (wrong == "dtype")
    own = {module: "forward" in vars(module) for module in model.modules()}
    language = model.model.language_model
    assert own[language.norm] == (not wrong or part != "rms_norm")
    assert own[language.layers[0].mlp] == (not wrong or part != "swiglu")
    assert bool(replaced_globals(language.layers[0].self_attn)) == (not wrong or part != "rope")
    assert not any("forward" in vars(module) for module in beside.model.language_model.modules())


def test_experts_are_left_to_the_graphs_of_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_vl_moe")
    pretend_kernels(model, monkeypatch)
    apply_liger(model, "auto")
    assert liger_of(model).parts == ("rms_norm", "rope") and "experts by transformers" in str(liger_line(model))
    apply_liger(model, True)
    assert liger_of(model).parts == ("rms_norm", "rope", "experts")
    assert liger_line(model) == "liger-kernel: RMSNorm, rotary positions, experts (not its losses)"


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.models.liger._on_gpu", lambda model: True)


def pretend_kernels(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU, and in place of liger's forwards some that need none: the classes' own."""
    layers = pytest.importorskip("vlm_pg.models.liger_layers")
    on_gpu(monkeypatch)
    monkeypatch.setattr("vlm_pg.models.liger._MANY_ROWS", 80)
    for part, (fits, _) in layers.FORWARDS.items():
        monkeypatch.setitem(layers.FORWARDS, part, (fits, _product if part == "swiglu" else _of_the_class))
    attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
    theirs = vars(sys.modules[type(attention).__module__])
    by = {name: _as_another(theirs[name]) for name in layers.ROTATIONS if name in theirs}
    monkeypatch.setattr(layers, "ROTATIONS", by)
    return layers


def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _as_another(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


def spoilt(by: Any, wrong: str) -> Any:
    """``by`` with a value a hundredth off, or one of another dtype, or with right ones and a gradient that is off."""

    def change(x: torch.Tensor) -> torch.Tensor:
        if wrong == "dtype":
            return x.double()
        if wrong == "output":
            return x * 1.01
        return x + 0.01 * (x - x.detach()) if wrong else x

    def run(*args: Any, **kwargs: Any) -> Any:
        found = by(*args, **kwargs)
        return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

    return run


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen2"])
def test_which_layers_change(family: str) -> None:
    """Of the counted model all norms, feed-forward layers and rotations; of a model beside it none."""
    layers = pytest.importorskip("vlm_pg.models.liger_layers")
    beside = tiny_model(family)
    settings = ModelSettings(path="tiny", liger=True)
    model = fake_policy(lambda: tiny_model(family), settings, fake_mode(), CpuFlashKernel()).model
    own = (layers.rms_norm, layers.rms_norm_around_one, layers.layer_norm, layers.swiglu, layers.experts)
    for one, changed in ((model, True), (beside, False)):
        for module in one.modules():
            kind = type(module).__name__
            if changed and kind.endswith("RMSNorm"):
                # Of Qwen3.5 alone weights are added to one; its norms name their epsilon otherwise.
                around_one = family.startswith("qwen3_5")
                assert module.forward.__func__ is (layers.rms_norm_around_one if around_one else layers.rms_norm), kind
                assert hasattr(module, "eps" if around_one else "variance_epsilon"), kind
            if kind.endswith("RMSNorm") or hasattr(module, "gate_up_proj") or hasattr(module, "up_proj"):
                assert (getattr(module.forward, "__func__", None) in own) == changed, kind
            if hasattr(module, "q_proj"):
                rotation = layer_global(module, "apply_rotary_pos_emb")
                assert (rotation is layers.rotate) == changed
    assert any(hasattr(module, "q_proj") for module in model.modules())


def test_a_replaced_name_is_seen_by_one_module_and_its_copies() -> None:
    model = tiny_model()
    first, second = (layer.self_attn for layer in model.model.language_model.layers[:2])
    theirs = layer_global(second, "apply_rotary_pos_emb")
    calls: list[Any] = []

    def rotation(*args: Any) -> Any:
        calls.append(args)
        return theirs(*args)

    assert set_layer_globals(first, {"apply_rotary_pos_emb": rotation, "never_called": None})
    assert not set_layer_globals(second, {"never_called": None})
    assert layer_global(second, "apply_rotary_pos_emb") is theirs
    assert layer_global(first, "apply_rotary_pos_emb") is rotation
    copied = deepcopy(first)
    hidden = torch.randn(1, 3, model.config.get_text_config().hidden_size)
    positions = torch.arange(3).expand(3, 1, 3)
    rotary = model.model.language_model.rotary_emb(hidden, positions)
    model.set_attn_implementation("sdpa")
    expected = second.__class__.forward(copied, hidden, position_embeddings=rotary)[0]
    with torch.no_grad():
        copied.v_proj.weight.zero_()
        copied.v_proj.bias.zero_()
    assert not calls and torch.equal(first(hidden, position_embeddings=rotary)[0], expected) and len(calls) == 1
    # The copy's own weights: values of zero.
    assert not copied(hidden, position_embeddings=rotary)[0].any() and len(calls) == 2
    with pytest.raises(AttributeError, match="has no global 'rotate_somehow'"):
        layer_global(first, "rotate_somehow")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_hooks_of_accelerate_stay_above_what_is_put_in(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model under ``device_map``: its hooks are called as before, by what is put in."""
    layers = pytest.importorskip("vlm_pg.models.liger_layers")
    from accelerate.hooks import ModelHook, add_hook_to_module

    called: list[str] = []

    class Notes(ModelHook):
        def __init__(self, name: str):
            self.name = name

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(self.name)
            return args, kwargs

    model = tiny_model(family)
    ends = ("input_layernorm", "mlp", "self_attn", "linear_attn", "conv1d")
    hooked = {name for name, _ in model.named_modules() if name.endswith(ends) and "language_model" in name}
    for name in hooked:
        add_hook_to_module(model.get_submodule(name), Notes(name))
    # Forwards that need no GPU, put in as liger's are.
    for part, (fits, _) in layers.FORWARDS.items():
        monkeypatch.setitem(layers.FORWARDS, part, (fits, _of_the_class))
    monkeypatch.setattr(layers, "ROTATIONS", {"apply_rotary_pos_emb": _theirs(model)})
    on_gpu(monkeypatch)
    policy = make_policy(model, tiny_processor(family), ModelSettings(path="tiny", liger=True))
    policy(
        Policy.stream_logprobs,
        policy.pack([ResponseGroup(text_prompt("one", torch.arange(10, 19)), (torch.arange(10, 14),))]),
        None,
    )
    assert set(called) == hooked and any(name.endswith("mlp") for name in hooked)
    attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
    assert layer_global(attention, "apply_rotary_pos_emb") is layers.ROTATIONS["apply_rotary_pos_emb"]


def _of_the_class(self: Any, *args: Any) -> Any:
    return type(self).forward(self, *args)


def _theirs(model: Any) -> Any:
    attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
    return layer_global(attention, "apply_rotary_pos_emb")


def test_keys_alone_are_rotated_in_memory_of_their_own() -> None:
    """The kernel rotates queries where they lie; the head that stands in for them must not be the keys'."""
    from vlm_pg.models.network import _rotate

    attention = tiny_model().model.language_model.layers[0].self_attn

    def in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return q.mul_(2), k.mul_(3)

    set_layer_globals(attention, {"apply_rotary_pos_emb": in_place})
    key = torch.ones(1, 1, 1, 8)
    assert torch.equal(_rotate(attention, key, key, key), torch.full((1, 1, 1, 8), 3.0))


@pytest.mark.parametrize("how", ["some", pytest.param("all", marks=pytest.mark.matrix)])
def test_numbers_are_those_of_transformers(how: str) -> None:
    """Each kernel in Triton's interpreter beside the modeling files' own code: outputs and gradients."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.support.liger_interpreted", how]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    *judged, found = run.stdout.splitlines()
    # What the comparison before use says of the same kernels.
    assert [line.partition(": ")[2] for line in judged] == ["{}"] * (4 if how == "all" else 0), judged
    errors = json.loads(found)
    # All: rotations of six families with many rows and with one, towers of four, and ten kinds of modules, twice.
    assert len(errors) == (2 * (12 + 4 + 10) if how == "all" else 11)
    for name, error in errors.items():
        # Some roundings of numbers as large as the largest.
        assert error < (1e-6 if name.endswith("float32") else 4 * 2**-11), name
