"""model.lora in a configuration: left out, given by file or command line, and refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import write_config
from vlm_pg.config import RunConfig, dump_config, load_config
from vlm_pg.errors import ConfigError
from vlm_pg.models.settings import LoraSettings
from vlm_pg.training.setup import low_lora_rate


def load(folder: Path, *overrides: str) -> RunConfig:
    sections = {"model": {"path": "tiny"}, "data": {"train": "x.jsonl"}, "training": {"steps": 1}}
    return load_config(write_config(folder / "run.yaml", sections), overrides)


def test_off_by_default_and_set_from_the_command_line(tmp_path: Path) -> None:
    assert load(tmp_path).model.lora is None
    assert load(tmp_path, "model.lora={}").model.lora == LoraSettings()
    config = load(tmp_path, "model.lora.rank=4", "model.lora.target_modules=[q_proj]")
    assert config.model.lora == LoraSettings(rank=4, target_modules=("q_proj",))
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.lora.dropout=0.1", "model.lora.dropout: dropout is 0.1; it must be 0"),
        ("model.lora.rnak=4", "Did you mean model.lora.rank?"),
        ("model.lora.rank=0", "Rows of A and columns of B"),
    ],
)
def test_refused_with_a_reason(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, override)
    assert message in str(error.value)


def test_an_adapter_beside_a_trained_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set model.train=\[language\], or leave model.lora out"):
        load(tmp_path, "model.lora={}", "model.train=[tower, merger, language]")


def test_the_default_learning_rate_of_an_adapter(tmp_path: Path) -> None:
    """Ten times that of full fine-tuning; what is set stays, and a file of resolved values says the same."""
    assert load(tmp_path).training.learning_rate == 1e-6
    config = load(tmp_path, "model.lora={}")
    assert config.training.learning_rate == 1e-5 and low_lora_rate(config) is None
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config
    assert load(tmp_path, "model.lora={}", "training.learning_rate=3e-5").training.learning_rate == 3e-5


def test_an_adapter_at_a_rate_of_full_fine_tuning_is_warned_about(tmp_path: Path) -> None:
    rate = "training.learning_rate=1e-6"
    config = load(tmp_path, "model.lora={}", rate)
    assert config.training.learning_rate == 1e-6
    assert "its peak learning rate is 1e-06, a rate of full fine-tuning" in str(low_lora_rate(config))
    assert low_lora_rate(load(tmp_path, rate)) is None
    by_part = load(tmp_path, "model.lora={}", "training.learning_rates.language=1e-6")
    assert "1e-06" in str(low_lora_rate(by_part))
