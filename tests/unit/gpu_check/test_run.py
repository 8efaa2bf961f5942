"""Stages stop no other, whatever becomes of them; what is left out says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.bench.gpu_check.page import render, write_page
from scripts.bench.gpu_check.reading import Reading
from scripts.bench.gpu_check.run import RESERVE_SECONDS, Outcome, Result, Run
from scripts.bench.gpu_check.stages import Stage
from vlm_pg.errors import ConfigError

MACHINE = {
    "system": "Linux", "cores": 2, "memory_gib": 4, "python": "3.11", "gpus": [], "commit": None,
    "packages": {"torch": "2.11.0"},
}  # fmt: skip
HEAD = {"when": "2026-01-01", "commands": ["bash scripts/gpu_check.sh"], "device": "cpu", "machine": MACHINE}


def stage(
    name: str, *codes: str, share: float = 1, read: Callable[[], Reading] = Reading, needs: tuple[str, ...] = (),
    needs_gpu: bool = False, least_seconds: float = 0, writes: tuple[Path, ...] = (), reads_others: bool = False,
) -> Stage:  # fmt: skip
    commands = tuple((sys.executable, "-c", code) for code in codes)
    return Stage(
        name, f"what {name} does", commands, share, read, needs, needs_gpu, least_seconds, writes, reads_others
    )


def outcomes(tmp_path: Path, *stages: Stage, seconds: float = 600, device: str = "cpu") -> dict[str, Outcome]:
    result = Result.open(tmp_path / "out", HEAD, resume=False)
    Run(result, device, seconds, []).go(stages)
    written = json.loads((tmp_path / "out/result.json").read_text())
    assert [one["name"] for one in written["stages"]] == [one.name for one in stages]
    return {outcome.name: outcome for outcome in result.outcomes}


def test_failures_of_every_kind_stop_no_other_stage(tmp_path: Path) -> None:
    def found_bad() -> Reading:
        return Reading({"grad_norm": 0.0, "loss": float("nan")}, "the gradient of every step is 0", ["a remark"])

    def cannot_read() -> Reading:
        raise KeyError("points")

    found = outcomes(
        tmp_path,
        stage("raises", "print('first'); raise ValueError('bad <b>thing</b>')"),
        stage("second command", "pass", "import sys; sys.exit(4)", "print('never')"),
        stage("bad numbers", "pass", read=found_bad),
        stage("unreadable", "pass", read=cannot_read),
        stage("no program", read=Reading),
        stage("good", "print('well')"),
    )
    assert found["raises"].status == "failed" and found["raises"].code == 1
    assert found["raises"].problem == "exit code 1: ValueError: bad <b>thing</b>"
    assert "first" in found["raises"].end_of_log
    assert found["second command"].code == 4 and len(found["second command"].commands) == 2
    assert (found["bad numbers"].status, found["bad numbers"].problem) == ("failed", "the gradient of every step is 0")
    assert found["bad numbers"].figures["grad_norm"] == 0.0 and found["bad numbers"].remarks == ["a remark"]
    # A number that JSON does not have is written as a word.
    written = json.loads((tmp_path / "out/result.json").read_text())["stages"]
    assert written[2]["figures"] == {"grad_norm": 0.0, "loss": "nan"}
    assert found["unreadable"].problem == "what it wrote could not be read"
    assert found["good"].status == "ok" and not found["good"].end_of_log
    assert "well" in (tmp_path / "out/good.log").read_text()


@pytest.mark.matrix
def test_a_stage_that_hangs_loses_its_own_share_of_the_time_alone(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        stage("hangs", "print('begun', flush=True); import time; time.sleep(600)", read=lambda: Reading({"half": 1})),
        stage("next", "pass"),
        stage("left out", "pass", share=100, needs_gpu=True),
        seconds=RESERVE_SECONDS + 12,
    )
    assert found["hangs"].status == "time was up" and found["hangs"].code is None
    assert found["hangs"].figures == {"half": 1} and found["hangs"].end_of_log[-1] == "begun"
    # Half of what there was: what is left out has no share.
    assert 5 <= found["hangs"].limit_seconds <= 6
    assert found["next"].status == "ok"


def test_what_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        stage("gpu", "raise SystemExit(1)", needs_gpu=True),
        stage("package", "raise SystemExit(1)", needs=("no_such_package", "sys")),
    )
    assert {one.status for one in found.values()} == {"left out"}
    assert found["gpu"].problem == "no GPU here"
    assert (
        found["package"].problem.startswith("no_such_package is not installed.")
        and "--wheels" in found["package"].problem
    )


def test_a_measurement_begins_only_with_the_time_it_needs(tmp_path: Path) -> None:
    found = outcomes(
        tmp_path,
        stage("first", "pass", least_seconds=10_000),
        stage("second", "pass", least_seconds=10_000),
        seconds=RESERVE_SECONDS + 60,
    )
    # The first is begun with any time: else a long one never would be.
    assert found["first"].status == "ok" and found["second"].status == "left out"
    assert "run again with --resume" in found["second"].problem


def test_going_on_runs_what_was_not_ok(tmp_path: Path) -> None:
    outcomes(tmp_path, stage("good", "pass"), stage("not asked", needs_gpu=True), stage("bad", "raise SystemExit(1)"))
    with pytest.raises(ConfigError, match=r"is not empty\. Add --resume"):
        Result.open(tmp_path / "out", HEAD, resume=False)
    again = Result.open(tmp_path / "out", HEAD | {"commands": ["again"]}, resume=True)
    assert again.head["commands"] == ["bash scripts/gpu_check.sh", "again"]
    Run(again, "cpu", 600, []).go([stage("good", "raise SystemExit(1)"), stage("bad", "pass")])
    assert [(one.name, one.status) for one in again.outcomes] == [
        ("good", "ok"),
        ("not asked", "left out"),
        ("bad", "ok"),
    ]


def test_what_others_have_left_is_read_again_and_files_of_an_earlier_try_go(tmp_path: Path) -> None:
    state, file = ["first"], tmp_path / "counts.json"

    def read() -> Reading:
        return Reading({"state": state[0]})

    once = "import sys; open(sys.argv[1], 'x')"
    fails = Stage("joins", "t", ((sys.executable, "-c", f"{once}; sys.exit(1)", str(file)),), 1, read, writes=(file,))
    assert outcomes(tmp_path, fails)["joins"].status == "failed" and file.is_file()
    again = Result.open(tmp_path / "out", HEAD, resume=True)
    command = (sys.executable, "-c", once, str(file))
    joins = Stage("joins", "t", (command,), 1, read, writes=(file,), reads_others=True)
    Run(again, "cpu", 600, []).go([joins])
    assert again.named("joins").status == "ok" and again.named("joins").figures == {"state": "first"}
    state[0] = "later"
    Run(again, "cpu", 600, []).go([joins])
    assert again.named("joins").figures == {"state": "later"}
    assert json.loads((tmp_path / "out/result.json").read_text())["stages"][0]["figures"] == {"state": "later"}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0, "stages": [], "commands": []}'])
def test_a_result_that_cannot_be_gone_on_with(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"result\.json .*--out"):
        Result.open(tmp_path, HEAD, resume=True)


def test_the_page_says_what_happened_and_asks_for_nothing_else(tmp_path: Path) -> None:
    outcomes(tmp_path, stage("raises", "raise ValueError('<script>alert(1)</script>')"), stage("gpu", needs_gpu=True))
    result = Result.open(tmp_path / "out", HEAD, resume=True)
    write_page(result)
    page = render({**HEAD, "stages": json.loads((tmp_path / "out/result.json").read_text())["stages"]})
    assert "no GPU here" in page and "nothing here says anything about one" in page and "torch 2.11.0" in page
    assert "ValueError: &lt;script&gt;" in page and "<script" not in page
    assert not [word for word in ("http:", "https:", "src=", "href=", "url(") if word in page]
