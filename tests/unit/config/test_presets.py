"""Presets are what docs/algorithms.md says they are, and nothing in them can be undone by accident."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from vlm_pg.algorithms.pruning import num_kept
from vlm_pg.algorithms.registry import LOSSES, PRESETS, Preset, PresetName
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.config import load_config
from vlm_pg.errors import ConfigError

REPO_ROOT = Path(__file__).parents[3]
DOCUMENT = (REPO_ROOT / "docs/algorithms.md").read_text(encoding="utf-8")


def table_below(first_cell: str) -> list[dict[str, str]]:
    """Rows of the document's only table whose header begins with ``first_cell``: column name -> cell."""
    (found,) = re.findall(rf"(?m)^(\| {re.escape(first_cell)} \|.*(?:\n\|.*)+)", DOCUMENT)
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in found.splitlines()]
    header, _, *rows = lines
    return [dict(zip(header, row, strict=True)) for row in rows]


def documented() -> dict[str, Preset]:
    """The presets as the document gives them."""
    settings, sources = table_below("setting"), {row["preset"]: row for row in table_below("preset")}
    presets = {}
    for column in (name for name in settings[0] if name != "setting"):
        fixed, usual = {}, {}
        for row in settings:
            cell, key = row[column], row["setting"].strip("`")
            if cell:
                (fixed if cell.startswith("**") else usual)[key] = yaml.safe_load(cell.strip("*"))
        source = sources[column]
        presets[column.strip("`")] = Preset(
            fixed, usual, source["source"], source["not given by the source (value used here)"]
        )
    return presets


def as_written(values: Any) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def another(key: str, value: Any) -> Any:
    """A value that ``key`` may have, other than ``value``."""
    allowed = get_args(AlgorithmSettings.model_fields[key].annotation)
    if allowed:
        return next(option for option in allowed if option != value)
    if key == "loss":
        return next(loss for loss in LOSSES if loss != value)
    return not value if isinstance(value, bool) else value + 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_the_document_gives_what_a_preset_sets(name: PresetName) -> None:
    assert list(documented()) == list(PRESETS) == list(get_args(PresetName))
    written, preset = documented()[name], PRESETS[name]
    assert written.fixed == as_written(preset.fixed) and written.usual == as_written(preset.usual)
    assert (written.source, written.unstated) == (preset.source, preset.unstated)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_its_values_and_is_no_difference_from_itself(name: PresetName) -> None:
    settings = AlgorithmSettings(preset=name)
    for key, value in PRESETS[name].values.items():
        assert getattr(settings, key) == value, key
    assert settings.differences_from_preset == {} and not set(PRESETS[name].fixed) & set(PRESETS[name].usual)


@pytest.mark.parametrize("name, key", [(name, key) for name, preset in PRESETS.items() for key in preset.fixed])
def test_what_is_fixed_cannot_be_set_to_something_else(name: PresetName, key: str) -> None:
    other = another(key, PRESETS[name].fixed[key])
    with pytest.raises(ValidationError, match=rf"preset is {name}, which contradicts {key}="):
        AlgorithmSettings(preset=name, **{key: other})


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_usual_can_be_set_and_is_reported(name: PresetName) -> None:
    usual = PRESETS[name].usual
    settings = AlgorithmSettings(preset=name, kl_coef=0.0625, **PRESETS[name].fixed)
    assert settings.kl_coef == 0.0625
    assert settings.differences_from_preset == {"kl_coef": (0.0625, usual["kl_coef"])}


def test_a_contradiction_in_a_config_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ntraining: {steps: 1}\nalgorithm: {preset: gspo}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, ["algorithm.ratio_level=token", "algorithm.prune_rate=0.5"])
    message = str(refused.value)
    assert "preset is gspo, which contradicts" in message
    assert "ratio_level='token' (the preset: 'sequence')" in message
    assert "prune_rate=0.5 (the preset: 0.0)" in message
    assert "set preset=null and every value you want" in message
    assert load_config(path, ["algorithm.preset=null", "algorithm.ratio_level=token"]).algorithm.clip_low == 0.2


def test_the_document_names_every_setting_of_the_algorithm() -> None:
    names = AlgorithmSettings.model_fields
    assert [name for name in names if not re.search(rf"`(?:algorithm\.)?{name}\b", DOCUMENT)] == []


def test_the_document_gives_what_pruning_keeps() -> None:
    (found,) = re.findall(r"(?m)^  (\| P \|.*(?:\n  \|.*)+)", DOCUMENT)
    header, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in found.splitlines()]
    assert len(rows) == 3
    for first, *cells in rows:
        generations = int(first.removeprefix("G = "))
        for rate, cell in zip(header[1:], cells, strict=True):
            kept = generations * (1 - Fraction(rate)) // 1
            assert cell == (str(kept) if kept else "-")
            if kept:
                assert num_kept(generations, float(rate)) == kept
            else:
                with pytest.raises(ValueError):
                    num_kept(generations, float(rate))


def test_settings_reference_is_current() -> None:
    """docs/settings.md is what scripts/settings_reference.py writes."""
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "scripts/settings_reference.py", "--check"], cwd=root).returncode == 0
