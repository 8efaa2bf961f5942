"""model.train and training.learning_rates in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import write_config
from vlm_pg.config import RunConfig, dump_config, load_config
from vlm_pg.errors import ConfigError


def load(folder: Path, *overrides: str) -> RunConfig:
    sections = {"model": {"path": "tiny"}, "data": {"train": "x.jsonl"}, "training": {"steps": 1}}
    return load_config(write_config(folder / "run.yaml", sections), overrides)


def test_the_language_model_by_default_and_rates_from_the_command_line(tmp_path: Path) -> None:
    assert load(tmp_path).model.train == ("language",) and load(tmp_path).training.learning_rates == {}
    config = load(tmp_path, "model.train=[merger, tower]", "training.learning_rates={tower: 2.0e-7}")
    assert config.model.train == ("tower", "merger") and config.training.learning_rates == {"tower": 2e-7}
    more = load(tmp_path, "model.train=[merger, tower]", "training.learning_rates.merger=1.0e-5")
    assert more.training.learning_rates == {"merger": 1e-5}
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["training.learning_rates.tower=2.0e-7"],
            "training.learning_rates.tower is 2e-07, but model.train is [language], so that part is frozen and has no "
            "rate. Add tower to model.train, or leave its rate out.",
        ),
        (["model.train=[merger]", "training.learning_rates={language: 1.0e-6}"], "so that part is frozen"),
        (["model.train=[vision]"], "'tower', 'merger' or 'language'"),
        (["model.train=[]"], "train is []; it must name one part or more"),
        (["training.learning_rates={towr: 1.0e-6}"], "'tower', 'merger' or 'language'"),
        (["training.learning_rates={language: 0}"], "greater than 0"),
    ],
)
def test_refused_with_a_reason(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *overrides)
    assert message in str(error.value)
