"""What must be the same on all ranks, and the lines of what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.config import RunConfig
from vlm_pg.training import setup
from vlm_pg.training.setup import differences, run_facts


def config(**sections: Any) -> RunConfig:
    whole = {"model": {"path": "m"}, "data": {"train": "r.json"}, "training": {"steps": 1}} | sections
    return RunConfig.model_validate(whole)


def changed(before: RunConfig, after: RunConfig) -> set[str]:
    old, new = run_facts(before), run_facts(after)
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def test_settings_count_but_for_those_of_a_host() -> None:
    assert changed(config(), config(training={"steps": 2})) == {"training.steps"}
    assert changed(config(), config(model={"path": "m", "lora": {"rank": 4}})) > {"model.lora.rank"}
    of_hosts: dict[str, Any] = {
        "data": {"train": "r.json", "media_root": "/fast"},
        "media": {"workers": 3},
        "training": {"steps": 1, "torch_threads": 2},
        "rollout": {"server": {"url": "http://127.0.0.1:1/v1"}},
    }
    assert changed(config(), config(**of_hosts)) == set()
    by_set: dict[str, Any] = {"train": {"a": "a.json", "b": "b.json"}}
    roots = [None, "/all", {"a": "/fast"}, {"a": "/slow", "b": "/slow"}]
    of_each = [config(data=by_set | {"media_root": root}) for root in roots]
    assert [changed(of_each[0], one) for one in of_each] == [set()] * len(roots)
    assert changed(of_each[0], config(data=by_set | {"train": {"a": "a.json", "b": "c.json"}})) == {"data.train.b"}
    for key in setup.OF_A_HOST:  # none that has been renamed
        section = config()
        for name in key.split("."):
            section = getattr(section, name)


def test_of_a_deepspeed_file_the_content_counts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json", "d.json")]
    for file, stage in zip(files, (2, 2, 3)):
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    one, same, other, absent = (
        config(training={"steps": 1, "engine": "deepspeed", "deepspeed_config": str(file)}) for file in files
    )
    assert changed(one, same) == set()
    assert changed(one, other) == {"training.deepspeed_config.zero_optimization.stage"}
    assert "training.deepspeed_config" in changed(one, absent)


def test_the_users_own_code_counts(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    own = config(reward={"functions": [{"function": f"{file}:f"}]}, algorithm={"loss": f"{file}:g"})
    absent = run_facts(own)
    file.write_text("def f(): ...")
    first = run_facts(own)
    file.write_text("def f(): return 1")
    assert len({facts[f"content of {file}"] for facts in (absent, first, run_facts(own))}) == 3


def test_sources_and_versions_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = run_facts(config())
    assert {"version of python", "version of torch", "version of transformers", "version of deepspeed"} < facts.keys()
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(setup.vlm_pg, "__file__", str(tmp_path / "__init__.py"))
    other = run_facts(config())
    (tmp_path / "a.py").write_text("2")
    assert len({found["source files of vlm_pg"] for found in (facts, other, run_facts(config()))}) == 3


def test_differences_name_values_and_their_ranks() -> None:
    hosts = ["node-1", "node-1", "node-2", "node-2"]
    facts = [{"x": "1", "y": "2"}, {"x": "1"}, {"x": "3", "y": "2"}, {"x": "3", "y": "2"}]
    assert differences(hosts, facts) == [
        "x: 1 on ranks 0 to 1 (node-1), 3 on ranks 2 to 3 (node-2)",
        "y: 2 on ranks 0 and 2 to 3 (node-1, node-2), not set on rank 1 (node-1)",
    ]
    many = differences(["a", "b"], [{f"{n:02}": "0" for n in range(20)}, {}])
    assert len(many) == setup.SHOWN + 1 and many[-1] == "and 8 more"
