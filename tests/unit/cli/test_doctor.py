"""The doctor names what is missing with a remedy, and fails only if the missing part is required."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vlm_pg import cli, doctor


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the given packages look as if they were not installed."""

    def hide(*names: str) -> None:
        real_version, real_import = importlib.metadata.version, doctor.importlib.import_module

        def version(name: str) -> str:
            if name in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return real_version(name)

        def import_module(name: str, *rest: object) -> object:
            if name in names:
                raise ImportError(f"No module named {name!r}")
            return real_import(name, *rest)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(doctor.importlib, "import_module", import_module)

    return hide


def test_on_this_machine_nothing_required_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("Ready.")
    for name in ("python", "cores", "memory", "disk", "torch", "transformers", "decord", "PyAV", "kernel cpu-flash"):
        assert f" {name} " in out


def test_a_missing_requirement_fails_and_everything_missing_has_a_remedy(
    without: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    without("transformers", "decord", "av", "mlflow", "tensorboard", "wandb", "swanlab", "mlflow-skinny")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING transformers" in out and f"-> {doctor.INSTALL}" in out and "Not ready" in out
    wrong = [f for f in doctor.findings() if f.status != "ok" and not f.name.startswith("kernel ")]
    assert {"transformers", "decord", "PyAV", "mlflow-skinny", "wandb"} <= {finding.name for finding in wrong}
    assert all(finding.remedy for finding in wrong)


def test_all_that_is_required_is_listed_as_required(
    without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    required = {Requirement(line).name for line in project["dependencies"]}
    assert required <= {finding.name for finding in doctor.findings()} | {"av"}
    for name in ("deepspeed", "rich", "math-verify"):
        without(name)
        assert [finding.status for finding in doctor.findings() if finding.name == name] == ["missing"]


def test_a_version_outside_what_was_tested_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1" if name == "transformers" else real(name))
    (finding,) = [finding for finding in doctor._packages() if finding.name == "transformers"]
    assert finding.status == "missing" and finding.remedy and "4.57.1, which is not <" in finding.detail


def test_pyav_is_needed_and_decord_is_not(without: Callable[..., None]) -> None:
    without("decord")
    assert [(finding.name, finding.status) for finding in doctor._decoders()] == [("PyAV", "ok"), ("decord", "note")]
    without("decord", "av")
    assert [finding.status for finding in doctor._decoders()] == ["missing", "note"]


def test_a_torch_that_does_not_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise OSError("libcudart.so.13: cannot open shared object file\nsecond line")

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    [finding] = doctor._devices_and_kernels()
    assert finding.status == "missing"
    assert finding.detail == "does not import: OSError: libcudart.so.13: cannot open shared object file"


def test_a_checkout_that_is_not_installed_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError("vlm-pg")

    monkeypatch.setattr(importlib.metadata, "requires", none)
    required = {one.name: one.specifier for one in doctor._required()}
    assert "2.11.0" in required["torch"] and "5.17.0" in required["transformers"] and "deepspeed" in required
    # Decoders are checked by importing them.
    assert "av" not in required and "decord" not in required
