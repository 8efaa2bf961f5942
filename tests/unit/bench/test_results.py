"""The file of raw numbers: never overwritten, gone on with only where settings agree; and what is printed and drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench import drawing as figures
from vlm_pg.bench.drawing import write_figure
from vlm_pg.bench.figure import main as figure_main
from vlm_pg.bench.grid import StepPoint as Point
from vlm_pg.bench.model import main as model_main
from vlm_pg.bench.options import DEFAULT_MINUTES, checked_options
from vlm_pg.bench.process import WorkerKilled, run_worker
from vlm_pg.bench.results import Results
from vlm_pg.bench.step import StepRun, gain_words
from vlm_pg.bench.step import main as step_main
from vlm_pg.bench.training.case import check_agreement
from vlm_pg.errors import ConfigError

SETTINGS = dict.fromkeys(StepRun.comparable, "x") | {"device": "cpu", "threads": 1, "checkpointing": False}


def _record(
    cpu_seconds: dict[str, list[float]] | None = None, prefix: int = 1024, count: int = 8, response: int = 128
) -> dict[str, Any]:
    numbers: dict[str, dict[str, Any]] = {
        "grouped": {"seconds": [1.0, 3.0, 2.0], "peak_bytes": 2**30},
        "transformers-batch": {"seconds": [8.0, 9.0, 8.0], "peak_bytes": 4 * 2**30},
    }
    for name, seconds in (cpu_seconds or {}).items():
        numbers[name]["cpu_seconds"] = seconds
    measured = {"contestants": numbers, "failed": {"prefix-grouper-kind": "killed by SIGKILL"}}
    return _run(None).summarise(Point(prefix, count, response), measured)


def test_a_gain_stands_beside_its_bound_and_its_share() -> None:
    record = _record()
    gain = record["contestants"]["transformers-batch"]["grouped_gain"]
    assert gain["speedup"] == 4.0 and gain["memory"] == 4.0
    assert gain["speedup_share"] == pytest.approx(4.0 / gain["bounds"]["flops"])
    lines = _run(None).lines(record)
    assert "2.000 s" in lines[0] and "faster" not in lines[0]
    assert f"{gain['speedup_share']:.0%} of the FLOP bound" in lines[1] and "4.00x less memory" in lines[1]
    assert lines[2].endswith("failed: killed by SIGKILL")
    assert "1.25x more memory" in gain_words({**gain, "memory": 0.8})


def test_a_disturbed_measurement_says_so_and_gives_processor_seconds() -> None:
    record = _record({"grouped": [1.0, 1.0, 2.0], "transformers-batch": [8.0, 9.0, 3.0]})  # grouped: 4 of 6 seconds
    gain = record["contestants"]["transformers-batch"]["grouped_gain"]
    assert gain["cpu_speedup"] == 8.0
    busy, processor = (line for line in _run(None).lines(record) if "busy" in line or "processor" in line)
    assert "grouped, transformers-batch had a core only part" in busy
    assert f"transformers-batch 8.00x (bound {gain['bounds']['flops']:.2f}x" in processor
    calm = _record({"grouped": [1.0, 3.0, 2.0], "transformers-batch": [8.0, 9.0, 8.0]})
    assert not any("busy" in line for line in _run(None).lines(calm))


def test_a_file_is_never_overwritten_and_resumed_only_with_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    results = Results.start(path, SETTINGS, "first", "step")
    assert Results.resume(path, SETTINGS, "killed before its first point", "step").data["points"] == []
    results.add_point(_record())
    with pytest.raises(ConfigError, match="--resume"):
        Results.start(path, SETTINGS, "again", "step")
    resumed = Results.resume(path, SETTINGS, "second", "step")
    assert resumed.find(Point(1024, 8, 128)) is not None
    assert resumed.find(Point(4096, 8, 512)) is None
    assert resumed.data["commands"] == ["first", "second"]
    with pytest.raises(ConfigError, match=r"threads 1 \(now 2\)"):
        Results.resume(path, {**SETTINGS, "threads": 2}, "third", "step")
    path.write_text('{"points": []}')
    with pytest.raises(ConfigError, match="format None"):
        Results.resume(path, SETTINGS, "fourth", "step")


def _run(path: Path | None, *words: str) -> StepRun:
    arguments = checked_options(StepRun.parser().parse_args(["--device", "cpu", "--threads", "1", *words]))
    results = (
        Results.start(None, SETTINGS, "now", "step") if path is None else Results.resume(path, SETTINGS, "now", "step")
    )
    return StepRun(arguments, results)


def test_reasons_stay_until_their_point_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    measured, tried, other = Point(1024, 8, 128), Point(4096, 8, 512), Point(2048, 8, 256)
    results = Results.start(path, SETTINGS, "first", "step")
    results.add_point(_record())
    for point in (measured, tried, other):
        results.add_skipped(point, {"transformers-sequential": "too long"})
    run = _run(path, "--budget-minutes", "1e-9", "--contestants", "grouped", "transformers-sequential")
    monkeypatch.setattr(run, "_measure", pytest.fail)
    run.measure([measured, tried])
    reasons = [(entry["prefix"], entry["contestant"], entry["reason"]) for entry in run.results.data["skipped"]]
    assert reasons[:2] == [(p.prefix, "transformers-sequential", "too long") for p in (measured, other)]
    assert [(prefix, name) for prefix, name, _ in reasons[2:]] == [
        (4096, "grouped"),
        (4096, "transformers-sequential"),
    ]
    assert all("0.0 s is left of the budget" in reason for _, _, reason in reasons[2:])


def test_a_point_given_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(None, "--points", "20,2,3")
    tried: list[Point] = []
    monkeypatch.setattr(run, "_measure", lambda point, plan: tried.append(point))
    run.measure([Point(20, 2, 3), Point(20, 2, 4), Point(20, 2, 3)])
    assert tried == [Point(20, 2, 3), Point(20, 2, 4)]


def test_a_run_that_cannot_be_drawn_says_so_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "new" / "step.svg"
    run = _run(None, "--points", "20,2,3", "--figure", str(figure))
    run.finish()
    assert "no figure: No point of this file has both grouped and" in capsys.readouterr().out
    assert not figure.parent.exists()
    run.results.add_point(_record())
    run.finish()
    assert figure.exists() and f"figure: {figure}" in capsys.readouterr().out


def test_contestants_that_disagree_are_not_timed() -> None:
    same = {"a": {"loss": -1.0, "gradient_norm": 2.0}, "b": {"loss": -1.00001, "gradient_norm": 2.0}}
    check_agreement(same, 1e-4)
    same["b"]["gradient_norm"] = 2.001
    with pytest.raises(RuntimeError, match=r"gradient_norm is 2\.0 for a and 2\.001 for b"):
        check_agreement(same, 1e-4)


def test_figure_is_whole_and_labelled(tmp_path: Path) -> None:
    points = [_record(), _record(response=64), _record(count=4), _record(prefix=4096, response=512)]
    machine = {"processor": "<CPU>"}
    data = {"format": 2, "measurement": "step", "settings": SETTINGS, "machine": machine, "points": points}
    drawn = write_figure(data, tmp_path / "a.svg").read_bytes()
    root = ElementTree.fromstring(drawn)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("G=4", "G=8", "bound by FLOPs", "prefix 1,024 tokens", "prefix 4,096 tokens"):
        assert expected in words
    for expected in ("speed-up (times)", "prefix tokens per response token", "peak memory (GiB)", "transformers-batch"):
        assert expected in words
    assert "model x, x; <CPU>, threads: 1" in words and "1,024" not in words
    paper = next(root.iter("{http://www.w3.org/2000/svg}path"))
    assert "fill: #ffffff" in paper.get("style", "")
    assert write_figure(data, tmp_path / "b.svg").read_bytes() == drawn and b"<dc:date>" not in drawn
    raw = tmp_path / "step.json"
    raw.write_text(json.dumps(data))
    assert figure_main([str(raw)]) == 0 and (tmp_path / "step.svg").exists()
    with pytest.raises(ConfigError, match="--against"):
        write_figure(data, tmp_path / "c.svg", "prefix-grouper-kind")


def test_without_matplotlib_it_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"matplotlib, which is not installed\. Install it with pip install 'vlm-pg\["
    ):
        step_main(["--points", "20,2,3", "--figure", str(tmp_path / "x.svg"), "--out", str(tmp_path / "x.json")])
    assert not list(tmp_path.iterdir())


def test_model_table_as_markdown(tmp_path: Path) -> None:
    out = tmp_path / "model.md"
    arguments = ["--models", "Qwen2.5-VL-7B", "--prefix", "8192", "--ratios", "8", "--generations", "4", "8"]
    assert model_main([*arguments, "--out", str(out)]) == 0
    assert "| prefix | ratio | G=4 | G=8 |\n|---|---|---|---|\n| 8,192 | 8 | 2.88x, " in out.read_text()
    with pytest.raises(ConfigError, match="Qwen9"):
        model_main(["--models", "Qwen9"])


def test_help_explains_itself_and_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        StepRun.parser().parse_args(["--help"])
    words = capsys.readouterr().out
    for expected in ("contestants:", "prefix-grouper-kind", "how it is measured:", "max_memory_allocated", "examples:"):
        assert expected in words
    with pytest.raises(ConfigError, match="--repeats is 0"):
        step_main(["--repeats", "0"])
    with pytest.raises(ConfigError, match="--out"):
        step_main(["--resume"])
    with pytest.raises(ConfigError, match="--budget-minutes is 0; it must be above 0"):
        step_main(["--budget-minutes", "0"])


def test_without_a_word_the_grid_gets_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    parse = StepRun.parser().parse_args
    assert checked_options(parse(["--device", "cpu"])).budget_minutes == DEFAULT_MINUTES
    assert "--budget-minutes" in capsys.readouterr().out
    for wanted in (["--points", "512,4,64"], ["--prefix", "512"]):
        assert checked_options(parse(["--device", "cpu", *wanted])).budget_minutes is None


def test_a_worker_that_hangs_is_stopped_and_named() -> None:
    with pytest.raises(WorkerKilled, match="not done after"):
        run_worker({"threads": 1}, 0.01)
    with pytest.raises(RuntimeError, match=r"KeyError: 'case'"):
        run_worker({"threads": 1}, 600)
