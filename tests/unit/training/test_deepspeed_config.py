"""Which AdamW goes with a DeepSpeed file, and what DeepSpeed is told about it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.support.processes import ROOT
from vlm_pg.errors import ConfigError
from vlm_pg.training.deepspeed_config import make_optimizer, read_deepspeed_config
from vlm_pg.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=1, learning_rate=1e-3, betas=(0.8, 0.9), adam_epsilon=1e-6, weight_decay=0.3)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def optimizer_for(config: dict[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}], SETTINGS, config, torch.device("cpu"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def load(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Error building extension 'cpu_adam'")

    monkeypatch.setattr(CPUAdamBuilder, "load", load)


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "none"}}], ids=str)
def test_states_on_the_device_are_torchs(zero: dict[str, Any]) -> None:
    config = {"zero_optimization": zero}
    optimizer = optimizer_for(config)
    assert type(optimizer) is torch.optim.AdamW
    assert config == {"zero_optimization": zero}
    (group,) = optimizer.param_groups
    chosen = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert chosen == {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def test_without_a_compiler_torchs_adam_updates_offloaded_states_and_a_line_says_so(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"zero_optimization": OFFLOAD}
    with caplog.at_level(logging.WARNING):
        assert type(optimizer_for(config)) is torch.optim.AdamW
    assert config["zero_force_ds_cpu_optimizer"] is False
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("vlm_pg")]
    assert "cannot be built (RuntimeError: Error building extension 'cpu_adam')" in line
    assert '"zero_force_ds_cpu_optimizer": false' in line


def test_the_file_can_choose_torchs_adam(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False}
    with caplog.at_level(logging.WARNING):
        assert type(optimizer_for(config)) is torch.optim.AdamW
    assert not [record for record in caplog.records if record.name.startswith("vlm_pg")]


@pytest.mark.parametrize(
    "zero, words",
    [
        ({"stage": 2, "offload_optimizer": True}, "offload_optimizer to True. Allowed is an object"),
        ({"stage": 3, "offload_param": "cpu"}, "offload_param to 'cpu'. Allowed is an object"),
        ({"stage": 2, "cpu_offload": True}, "cpu_offload, DeepSpeed's old names for offloading. Set zero_optimization"),
        ({"stage": 0}, "has ZeRO stage 0"),
        ({"stage": 2, "compute_grad_norm": False}, "compute_grad_norm to false, but every step clips"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "in stage 2, in which every rank holds all"),
        ({"stage": 1, "offload_optimizer": {"device": "nvme"}}, "device nvme in stage 1. DeepSpeed reaches NVMe in"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "device nvme without nvme_path. Set nvme_path to a folder"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "the learning rate the run began with"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}, "checkpoint does not reach"),
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zenflow, which keeps optimizer states where a checkpoint"),
        ({"stage": 2, "overlap_com": True}, "that DeepSpeed refuses: .*overlap_com"),
        ({"stage": 3, "offload_param": {"device": "disk"}}, "that DeepSpeed refuses: .*disk"),
    ],
    ids=str,
)
def test_files_that_would_end_in_a_traceback_are_refused(zero: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    settings = SETTINGS.model_copy(update={"deepspeed_config": str(file)})
    with pytest.raises(ConfigError, match=re.compile(words, re.DOTALL)):
        read_deepspeed_config(settings)


@pytest.mark.parametrize("content, words", [('{"bf16": 1}', "stage 0"), ("[]", "holds no JSON object")])
def test_other_content_is_refused(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_deepspeed_config(SETTINGS.model_copy(update={"deepspeed_config": str(file)}))


@pytest.mark.parametrize("section", ["checkpoint", "datastates_ckpt", "nebula"])
def test_deepspeeds_own_checkpoints_are_refused(section: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, section: {}}))
    with pytest.raises(ConfigError, match=f"sets {section}, which is about checkpoints of DeepSpeed's own"):
        read_deepspeed_config(SETTINGS.model_copy(update={"deepspeed_config": str(file)}))


def test_what_other_settings_decide_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}))
    with pytest.raises(ConfigError, match="sets gradient_allreduce_op, which the training and model sections decide"):
        read_deepspeed_config(SETTINGS.model_copy(update={"deepspeed_config": str(file)}))


@pytest.mark.parametrize("builds", [True, False])
def test_every_shipped_file_is_accepted_nvme_where_it_can_be_reached(
    builds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they train is shown by tests/integration/test_layouts.py."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: builds)
    files = sorted((ROOT / "configs/deepspeed").glob("*.json"))
    assert {file.stem for file in files} == {
        *("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
    }
    for file in files:
        settings = SETTINGS.model_copy(update={"deepspeed_config": str(file)})
        if builds or file.stem != "zero3_nvme":
            assert read_deepspeed_config(settings)["zero_optimization"]["stage"] == int(file.stem[4])
            continue
        with pytest.raises(ConfigError, match=r"async_io cannot be built .* needs a C\+\+ compiler and libaio"):
            read_deepspeed_config(settings)
