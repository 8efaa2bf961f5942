"""The doctor names what is missing with a remedy, and fails only if the missing part is required."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest

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


def test_a_missing_requirement_fails_with_its_remedy(
    without: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    without("transformers")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING transformers" in out
    assert f"-> {doctor.INSTALL}" in out
    assert "Not ready" in out


def test_pyav_is_needed_and_decord_is_not(without: Callable[..., None]) -> None:
    without("decord")
    assert [(finding.name, finding.status) for finding in doctor._decoders()] == [("PyAV", "ok"), ("decord", "note")]
    without("decord", "av")
    assert [(finding.name, finding.status) for finding in doctor._decoders()] == [
        ("PyAV", "missing"),
        ("decord", "note"),
    ]


def test_everything_that_is_wrong_has_a_remedy(without: Callable[..., None]) -> None:
    without("transformers", "deepspeed", "tensorboard", "decord", "av")
    wrong = [f for f in doctor.findings() if f.status != "ok" and not f.name.startswith("kernel ")]
    assert {"transformers", "deepspeed", "tensorboard", "decord", "PyAV"} <= {finding.name for finding in wrong}
    assert all(finding.remedy for finding in wrong)


def test_a_torch_that_does_not_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise OSError("libcudart.so.13: cannot open shared object file\nsecond line")

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    [finding] = doctor._devices_and_kernels()
    assert finding.status == "missing"
    assert finding.detail == "does not import: OSError: libcudart.so.13: cannot open shared object file"
