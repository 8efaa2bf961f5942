"""liger-kernel is refused with a reason where it cannot work."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.liger import apply_liger, liger_line
from vlm_pg.models.loading import make_policy
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import ModelSettings


def test_a_model_that_is_not_on_a_gpu() -> None:
    with pytest.raises(ModelError, match=r"need a GPU and the model is on cpu"):
        make_policy(tiny_model(), tiny_processor(), ModelSettings(path="tiny", liger=True))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.models.liger._device_of", lambda model: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'vlm-pg\[liger\]'"):
        apply_liger(tiny_model())


def test_a_family_it_knows_nothing_of() -> None:
    model = tiny_model()
    model.config.model_type = "qwen9_vl"
    with pytest.raises(ModelError, match="nothing for model type 'qwen9_vl'"):
        apply_liger(model)


def test_every_family_is_listed() -> None:
    assert all(family.liger for family in FAMILIES.values())


def test_the_line_names_the_parts() -> None:
    assert liger_line(tiny_model()) == "liger-kernel: RMSNorm, SwiGLU (not its losses)"


def test_only_the_parts_are_switched_on_and_other_models_keep_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package's function of the same signature."""
    calls: list[dict[str, object]] = []

    def patch(  # type: ignore[no-untyped-def]
        rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None
    ):
        calls.append(
            {
                "rope": rope,
                "losses": cross_entropy or fused_linear_cross_entropy,
                "rms_norm": rms_norm,
                "swiglu": swiglu,
                "model": model,
            }
        )
        modeling.Qwen2MLP = torch.nn.Identity  # type: ignore[misc,assignment]

    package, transformers_part, monkey_patch = (ModuleType(n) for n in ("liger_kernel", "transformers", "monkey_patch"))
    monkey_patch.apply_liger_kernel_to_qwen2_5_vl = patch  # type: ignore[attr-defined]
    transformers_part.monkey_patch = monkey_patch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers_part)
    monkeypatch.setattr("vlm_pg.models.liger._device_of", lambda model: torch.device("cuda"))
    model, before = tiny_model(), modeling.Qwen2MLP
    apply_liger(model)
    assert modeling.Qwen2MLP is before
    assert calls == [{"rope": False, "losses": False, "rms_norm": True, "swiglu": True, "model": model}]
