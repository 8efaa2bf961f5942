"""Which AdamW goes with a DeepSpeed file, and what DeepSpeed is told about it."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import pytest
import torch

from vlm_pg.training.deepspeed_config import make_optimizer
from vlm_pg.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=1, learning_rate=1e-3, betas=(0.8, 0.9), adam_epsilon=1e-6, weight_decay=0.3)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def optimizer_for(config: dict[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer([torch.nn.Parameter(torch.ones(2))], SETTINGS, config, torch.device("cpu"))


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
