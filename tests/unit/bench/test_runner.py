"""Points, the results file, which is never overwritten and resumed only with equal settings, and the printed gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench.rollout import CONTESTANTS as ROLLOUT_CONTESTANTS
from vlm_pg.bench.rollout import RolloutRun
from vlm_pg.bench.runner import PointsRun, Results, WorkerKilled, checked_options, run_worker
from vlm_pg.bench.step import StepRun
from vlm_pg.bench.step import main as step_main
from vlm_pg.bench.step_case import check_agreement
from vlm_pg.bench.work import RolloutPoint, StepPoint
from vlm_pg.errors import ConfigError

SETTINGS = dict.fromkeys(StepRun.comparable, "x") | {"device": "cpu", "threads": 1, "checkpointing": False}


def run_of(kind: type[PointsRun[Any]], *words: str, path: Path | None = None) -> Any:
    arguments = checked_options(kind.parser().parse_args(["--device", "cpu", "--threads", "1", *words]))
    begin = Results.start if path is None else Results.resume
    return kind(arguments, begin(path, SETTINGS, "now", kind.measurement))  # type: ignore[arg-type]


def points(kind: type[PointsRun[Any]], *words: str) -> list[Any]:
    return kind.points(kind.parser().parse_args(list(words)))


def test_points_in_words_and_faults() -> None:
    assert points(StepRun, "--points", "4096,8,512", "4096,8,512") == [StepPoint(4096, 8, 512)]
    assert points(StepRun, "--ragged", "--points", "64,4,8") == [StepPoint(64, 4, 8, True)]
    assert points(RolloutRun, "--points", "4096,8,64", "512,4,256,3") == [
        RolloutPoint(4096, 8, 64, 1),
        RolloutPoint(512, 4, 256, 3),
    ]
    assert len(points(StepRun)) == len(points(RolloutRun)) == 2
    with pytest.raises(ConfigError, match="PREFIX,GENERATIONS,RESPONSE"):
        points(StepRun, "--points", "4096,8")
    with pytest.raises(ConfigError, match="PREFIX,GENERATIONS,NEW_TOKENS,GROUPS"):
        points(RolloutRun, "--points", "4096,8")
    for make in (lambda: StepPoint(4096, 8, 1), lambda: RolloutPoint(4096, 8, 1)):
        with pytest.raises(ConfigError, match="at least 2 tokens"):
            make()
    with pytest.raises(ConfigError, match="at least 1 group"):
        RolloutPoint(4096, 8, 64, 0)


def test_ragged_lengths_are_drawn_once_and_for_all() -> None:
    point = StepPoint(1024, 16, 128, ragged=True)
    assert point.lengths == StepPoint(1024, 16, 128, ragged=True).lengths
    assert all(32 <= length <= 128 for length in point.lengths) and len(set(point.lengths)) > 4
    assert StepPoint(1024, 2, 128).lengths == (128, 128)


def step_record(cpu_seconds: dict[str, list[float]] | None = None) -> dict[str, Any]:
    numbers: dict[str, dict[str, Any]] = {
        "grouped": {"seconds": [1.0, 3.0, 2.0], "peak_bytes": 2**30},
        "transformers-batch": {"seconds": [8.0, 9.0, 8.0], "peak_bytes": 4 * 2**30},
    }
    for name, seconds in (cpu_seconds or {}).items():
        numbers[name]["cpu_seconds"] = seconds
    measured = {"contestants": numbers, "failed": {"grouped-chunked": "killed by SIGKILL"}}
    record: dict[str, Any] = run_of(StepRun).summarise(StepPoint(1024, 8, 128), measured)
    return record


def test_a_gain_stands_beside_its_bound_and_its_share() -> None:
    record = step_record()
    gain = record["contestants"]["transformers-batch"]["grouped_gain"]
    assert gain["speedup"] == 4.0 and gain["memory"] == 4.0
    assert gain["speedup_share"] == pytest.approx(4.0 / gain["bounds"]["flops"])
    lines = run_of(StepRun).lines(record)
    assert "2.000 s" in lines[0] and "faster" not in lines[0]
    assert f"{gain['speedup_share']:.0%} of the FLOP ratio" in lines[1] and "4.00x less memory" in lines[1]
    assert lines[2].endswith("failed: killed by SIGKILL")
    gain["memory"] = 0.8
    assert "1.25x more memory" in run_of(StepRun).lines(record)[1]


def test_a_disturbed_measurement_says_so_and_gives_processor_seconds() -> None:
    record = step_record({"grouped": [1.0, 1.0, 2.0], "transformers-batch": [8.0, 9.0, 3.0]})  # grouped: 4 of 6 seconds
    assert record["contestants"]["transformers-batch"]["grouped_gain"]["cpu_speedup"] == 8.0
    lines = run_of(StepRun).lines(record)
    assert any("grouped, transformers-batch had a core only part" in line for line in lines)
    assert "8.00x in processor seconds" in lines[1]
    calm = step_record({"grouped": [1.0, 3.0, 2.0], "transformers-batch": [8.0, 9.0, 8.0]})
    assert not any("busy" in line for line in run_of(StepRun).lines(calm))


def test_speeds_and_gains_of_generation_come_from_medians() -> None:
    common = {"equal_tokens": 1.0}
    numbers = {
        "ours": {"seconds": [2.0, 9.0, 1.0], "first_seconds": [1.0, 1.0, 9.0], "peak_bytes": 2**29, **common},
        "transformers-generate": {"seconds": [10.0], "first_seconds": [8.0], "peak_bytes": 2**30, **common},
        "ours-one-by-one": {"seconds": [3.0], "first_seconds": [4.0], "equal_tokens": 0.75},
    }
    measured, point = {"contestants": numbers, "failed": {}}, RolloutPoint(1024, 8, 5, 2)
    record = run_of(RolloutRun).summarise(point, measured)
    ours, generate = record["contestants"]["ours"], record["contestants"]["transformers-generate"]
    assert (ours["median_seconds"], ours["first_token_seconds"]) == (2.0, 1.0)
    assert ours["tokens_per_second"] == 2 * 8 * 5 / 2.0
    assert ours["decode_seconds_per_token"] == (2.0 - 1.0) / 4
    gain = generate["ours_gain"]
    assert (gain["throughput"], gain["first_token"], gain["decode"], gain["memory"]) == (5.0, 8.0, 2.0, 2.0)
    assert gain["bounds"]["prefill_tokens"] == 8
    assert gain["bounds"]["kv_bytes"] == 16 * (1024 + 4) / (2 * (1024 + 8 * 4)) and 1 < gain["bounds"]["flops"] < 8
    lines = "\n".join(run_of(RolloutRun).lines(record))
    assert "40.0 tok/s, first after 1.000 s, then 250.0 ms a token" in lines
    assert "5.00x tokens/s" in lines and "8.00x to the first token (expected 8.00x" in lines
    assert "2.00x less memory" in lines and "75.0% of its tokens equal" in lines
    # The one token took longer than the whole run: no decode time can be told, and none is made up.
    alone = record["contestants"]["ours-one-by-one"]["ours_gain"]
    assert "decode" not in alone and "memory" not in alone
    run = run_of(RolloutRun)
    assert "ours-one-by-one" not in run.contestants_at(RolloutPoint(8, 2, 2, 1))
    assert run.contestants_at(point) == list(ROLLOUT_CONTESTANTS)


def test_a_file_is_never_overwritten_and_resumed_only_with_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    results = Results.start(path, SETTINGS, "first", "step")
    assert Results.resume(path, SETTINGS, "killed before its first point", "step").data["points"] == []
    results.add_point(step_record())
    with pytest.raises(ConfigError, match="--resume"):
        Results.start(path, SETTINGS, "again", "step")
    resumed = Results.resume(path, SETTINGS, "second", "step")
    assert resumed.find(StepPoint(1024, 8, 128)) is not None
    assert resumed.find(StepPoint(4096, 8, 512)) is None
    assert resumed.data["commands"] == ["first", "second"]
    with pytest.raises(ConfigError, match=r"threads 1 \(now 2\)"):
        Results.resume(path, {**SETTINGS, "threads": 2}, "third", "step")
    with pytest.raises(ConfigError, match="written by `vlm-pg bench step`, not by `vlm-pg bench rollout`"):
        Results.resume(path, SETTINGS, "third", "rollout")
    path.write_text('{"points": []}')
    with pytest.raises(ConfigError, match="format None"):
        Results.resume(path, SETTINGS, "fourth", "step")


def test_reasons_stay_until_their_point_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    measured, tried, other = StepPoint(1024, 8, 128), StepPoint(4096, 8, 512), StepPoint(2048, 8, 256)
    results = Results.start(path, SETTINGS, "first", "step")
    results.add_point(step_record())
    for point in (measured, tried, other):
        results.add_skipped(point, {"transformers-sequential": "too long"})
    run = run_of(StepRun, path=path)
    found: list[StepPoint] = []
    monkeypatch.setattr(run, "_measure", found.append)
    run.measure([measured, tried])
    assert found == [tried]
    assert [entry["prefix"] for entry in run.results.data["skipped"]] == [measured.prefix, other.prefix]


def test_contestants_that_disagree_are_not_timed() -> None:
    same = {"a": {"loss": -1.0, "gradient_norm": 2.0}, "b": {"loss": -1.00001, "gradient_norm": 2.0}}
    check_agreement(same, 1e-4)
    same["b"]["gradient_norm"] = 2.001
    with pytest.raises(RuntimeError, match=r"gradient_norm is 2\.0 for a and 2\.001 for b"):
        check_agreement(same, 1e-4)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--repeats is 0"):
        step_main(["--repeats", "0"])
    with pytest.raises(ConfigError, match="--out"):
        step_main(["--resume"])


@pytest.mark.matrix
def test_a_worker_that_hangs_is_stopped_and_named() -> None:
    with pytest.raises(WorkerKilled, match="not done after"):
        run_worker({"threads": 1}, 0.01)
    with pytest.raises(RuntimeError, match=r"KeyError: 'case'"):
        run_worker({"threads": 1}, 600)
