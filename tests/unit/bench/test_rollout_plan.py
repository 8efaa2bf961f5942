"""``bench rollout``: what is measured first, what it is expected to cost, and what is printed and drawn of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench.budget import plan_point
from vlm_pg.bench.drawing import write_figure
from vlm_pg.bench.figure import main as figure_main
from vlm_pg.bench.flops import generation_flops, kv_bytes
from vlm_pg.bench.generation.transformers_continuous import blocks_needed
from vlm_pg.bench.grid import RolloutPoint
from vlm_pg.bench.results import Results
from vlm_pg.bench.rollout import CONTESTANTS, GENERATIONS, PREFIXES, RolloutRun
from vlm_pg.bench.shapes import SIZES
from vlm_pg.bench.work import (
    continuous_generation,
    one_by_one_generation,
    repeated_generation,
    shared_generation,
)
from vlm_pg.errors import ConfigError

SMALL = SIZES["small"]
SETTINGS = dict.fromkeys(RolloutRun.comparable, "x") | {"device": "cpu", "threads": 1}


def _run() -> RolloutRun:
    arguments = RolloutRun.parser().parse_args(["--device", "cpu", "--threads", "1"])
    return RolloutRun(arguments, Results.start(None, SETTINGS, "now", "rollout"))


def _points(*words: str) -> list[RolloutPoint]:
    return RolloutRun.points(RolloutRun.parser().parse_args(list(words)))


def _record(prefix: int = 1024, generations: int = 8, new_tokens: int = 5, groups: int = 1) -> dict[str, Any]:
    common = {"equal_tokens": 1.0}
    numbers = {
        "ours": {"seconds": [2.0, 9.0, 1.0], "first_seconds": [1.0, 1.0, 9.0], "peak_bytes": 2**29, **common},
        "transformers-generate": {"seconds": [10.0], "first_seconds": [8.0], "peak_bytes": 2**30, **common},
        "transformers-continuous": {"seconds": [3.0], "first_seconds": [4.0], "equal_tokens": 0.75},
    }
    measured = {"contestants": numbers, "failed": {"ours-one-by-one": "killed by SIGKILL"}}
    return _run().summarise(RolloutPoint(prefix, generations, new_tokens, groups), measured)


def test_the_whole_grid_starts_at_the_centre_of_every_prefix() -> None:
    points = _points()
    assert len(points) == len(set(points)) == 4 * 3 * 2 * 2
    assert points[:4] == [RolloutPoint(prefix, 8, 64, 1) for prefix in PREFIXES]
    off = [(p.generations != 8) + (p.new_tokens != 64) + (p.groups != 1) for p in points]
    assert off == sorted(off)


def test_points_in_words_and_faults() -> None:
    assert _points("--points", "4096,8,64", "512,4,256,3") == [
        RolloutPoint(4096, 8, 64, 1),
        RolloutPoint(512, 4, 256, 3),
    ]
    with pytest.raises(ConfigError, match="PREFIX,GENERATIONS,NEW_TOKENS,GROUPS"):
        _points("--points", "4096,8")
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        RolloutPoint(4096, 8, 1)
    with pytest.raises(ConfigError, match="at least 1 group"):
        RolloutPoint(4096, 8, 64, 0)


def test_work_counted_by_hand() -> None:
    """2 prompts of 10 tokens, 3 responses of 4: the 4th is never read, the 1st is predicted by the prompt."""
    point = RolloutPoint(10, 3, 4, groups=2)
    shared, repeated, separate = (
        make(point) for make in (shared_generation, repeated_generation, one_by_one_generation)
    )
    assert shared.prefill.tokens == separate.prefill.tokens == 2 * 10
    assert repeated.prefill.tokens == 6 * 10
    assert shared.prefill.pairs == 2 * 55
    assert repeated.prefill.pairs == 6 * 55
    # Response tokens 1, 2 and 3 attend to 11, 12 and 13 tokens.
    for work in (shared, repeated, separate):
        assert work.decode.tokens == 6 * 3
        assert work.decode.pairs == 6 * (11 + 12 + 13)
        assert work.prefill.logit_rows + work.decode.logit_rows == 6 * 4
    assert (shared.steps, repeated.steps, separate.steps) == (3, 3, 6)
    assert (shared.kv_tokens, repeated.kv_tokens, separate.kv_tokens) == (2 * (10 + 9), 6 * 13, 10 + 9)
    assert continuous_generation(point).kv_tokens == shared.kv_tokens
    # 4 layers, 2 key-value heads of 64, keys and values, 4 bytes.
    assert kv_bytes(SMALL, shared, 4) == 38 * 2 * 4 * 2 * 64 * 4
    assert 1 < generation_flops(SMALL, repeated) / generation_flops(SMALL, shared) < 3


def test_blocks_of_continuous_batching() -> None:
    # 599 = 2 full blocks and 87 tokens; 87 + 64 fit into one block per response, and there is one more for each.
    assert blocks_needed(600, 4, 64, groups=3) == 3 * (2 + 4 * 2)
    assert blocks_needed(600, 4, 169, groups=1) == 2 + 4 * 2
    assert blocks_needed(600, 4, 170, groups=1) == 2 + 4 * 3
    # A prompt of whole blocks is forked one token before its end: its last block is every response's own.
    assert blocks_needed(512, 4, 1, groups=1) == 1 + 4 * 2


def test_a_budget_and_memory_leave_out_with_reasons() -> None:
    estimator = replace(_run().estimator, first_rate=1e10, start_seconds=1.0)
    point = RolloutPoint(4096, 16, 64)
    names = list(CONTESTANTS)
    ours, repeated = (estimator.seconds(name, point) for name in ("ours", "transformers-generate"))
    assert repeated > 5 * ours
    total = 2 * (1.0 + 3.0 * ours + estimator.seconds("transformers-continuous", point) * 3 + 0.1)
    plan = plan_point(point, names[:3], estimator, 3, total, total, None)
    assert plan.contestants == ["ours", "transformers-continuous"]
    assert "a point's most" in plan.skipped["transformers-generate"]
    limit = estimator.peak_bytes("transformers-generate", point) - 1
    plan = plan_point(point, names, estimator, 3, None, None, limit)
    assert list(plan.skipped) == ["transformers-generate"] and "GiB" in plan.skipped["transformers-generate"]
    estimator.learn("ours", point, seconds=7.0, peak_bytes=1000)
    assert estimator.seconds("ours", point) == pytest.approx(7.0)
    assert estimator.peak_bytes("ours", point) == pytest.approx(1000)


def test_one_group_after_the_other_runs_only_where_there_are_several() -> None:
    run = _run()
    assert "ours-one-by-one" not in run.contestants_at(RolloutPoint(8, 2, 2, 1))
    assert run.contestants_at(RolloutPoint(8, 2, 2, 2)) == list(CONTESTANTS)


def test_speeds_and_gains_come_from_medians() -> None:
    record = _record(groups=2)
    ours, generate = record["contestants"]["ours"], record["contestants"]["transformers-generate"]
    assert (ours["median_seconds"], ours["first_token_seconds"]) == (2.0, 1.0)
    assert ours["tokens_per_second"] == 2 * 8 * 5 / 2.0
    assert ours["decode_seconds_per_token"] == (2.0 - 1.0) / 4
    gain = generate["ours_gain"]
    assert (gain["throughput"], gain["first_token"], gain["decode"], gain["memory"]) == (5.0, 8.0, 2.0, 2.0)
    assert gain["bounds"]["prefill_tokens"] == 8
    assert gain["bounds"]["kv_bytes"] == 16 * (1024 + 4) / (2 * (1024 + 8 * 4)) and 1 < gain["bounds"]["flops"] < 8
    lines = "\n".join(_run().lines(record))
    assert "40.0 tok/s, first after 1.000 s, then 250.0 ms a token" in lines
    assert "5.00x tokens/s" in lines and "8.00x to the first token (bound 8.00x" in lines
    assert "2.00x less memory" in lines
    assert "75.0% of its tokens equal" in lines and "ours-one-by-one          failed: killed by SIGKILL" in lines
    # The one token took longer than the whole run: no decode time can be told, and none is made up.
    assert "decode" not in record["contestants"]["transformers-continuous"]["ours_gain"]
    assert "memory" not in record["contestants"]["transformers-continuous"]["ours_gain"]


def test_a_file_belongs_to_one_measurement(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    results = Results.start(path, SETTINGS, "first", "rollout")
    results.add_point(_record())
    resumed = Results.resume(path, SETTINGS, "second", "rollout")
    assert resumed.find(RolloutPoint(1024, 8, 5)) is not None
    assert resumed.find(RolloutPoint(1024, 8, 5, groups=2)) is None and resumed.find(RolloutPoint(1024, 8, 6)) is None
    with pytest.raises(ConfigError, match="written by `vlm-pg bench rollout`, not by `vlm-pg bench step`"):
        Results.resume(path, SETTINGS, "third", "step")
    with pytest.raises(ConfigError, match=r"threads 1 \(now 2\)"):
        Results.resume(path, {**SETTINGS, "threads": 2}, "third", "rollout")


def test_figure_is_whole_and_labelled(tmp_path: Path) -> None:
    points = [_record(), _record(4096), _record(generations=4), _record(groups=4)]
    machine = {"processor": "<CPU>"}
    data = {"format": 2, "measurement": "rollout", "settings": SETTINGS, "machine": machine, "points": points}
    root = ElementTree.fromstring(write_figure(data, tmp_path / "a.svg").read_bytes())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("G=4", "G=8", "tokens/s: 5 new tokens, 1 group", "peak memory: 5 new tokens, 4 groups"):
        assert expected in words
    for expected in ("times as fast", "times less memory", "prefix (tokens)", "1,024", "4,096"):
        assert expected in words
    raw = tmp_path / "rollout.json"
    raw.write_text(json.dumps(data))
    assert figure_main([str(raw)]) == 0
    assert "ours against transformers-generate" in (tmp_path / "rollout.svg").read_text()
    folder = tmp_path / "new" / "folder"
    for point in points:
        del point["contestants"]["transformers-generate"]
    write_figure(data, folder / "rollout.svg")
    assert "ours against transformers-continuous" in (folder / "rollout.svg").read_text()
    with pytest.raises(ConfigError, match="there are transformers-continuous; choose one with --against"):
        write_figure(data, folder / "rollout.svg", "transformers-generate")
    # No memory was measured of this one: its panel is left out.
    assert "peak memory:" not in (folder / "rollout.svg").read_text()
    with pytest.raises(ConfigError, match="--against"):
        figure_main([str(raw), "--against", "ours-one-by-one"])
    raw.write_text(json.dumps({**data, "measurement": "walk"}))
    with pytest.raises(ConfigError, match="'walk'; known are step, rollout"):
        figure_main([str(raw)])


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RolloutRun.parser().parse_args(["--help"])
    words = capsys.readouterr().out
    for expected in (*CONTESTANTS, "time to first token", "greedily", "max_memory_allocated", "examples:"):
        assert expected in words
    defaults = RolloutRun.parser().parse_args([])
    assert defaults.contestants == list(CONTESTANTS) and defaults.generations == GENERATIONS
