"""A run whose folder was damaged: it goes on as if nothing had happened, says what it passes over, or stops and erases
nothing. The table is generated (``tests/support/damages.py``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.damages import CHECKPOINT_FILES, NEWEST, STATES, Damage, all_damages
from tests.support.runs import read_lines
from tests.support.short_run import STEPS, contents, short_run, train_here
from vlm_pg.files import parse_json_line
from vlm_pg.observe.report.page import write_report

DAMAGES = all_damages()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints, and the same run one step longer."""
    folder = tmp_path_factory.mktemp("damages")
    config = short_run(folder)
    assert train_here(config).code == 0
    newest = folder / "run" / NEWEST
    found = [str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(CHECKPOINT_FILES)
    shutil.copytree(folder / "run", folder / "longer")
    assert train_here(config, f"run.dir={folder}/longer", f"training.steps={STEPS + 1}").code == 0
    return folder


def test_the_table_is_as_large_as_promised() -> None:
    names = [damage.name for damage in DAMAGES]
    assert len(names) == len(set(names)) >= 130
    assert {damage.ends for damage in DAMAGES} == {"continued", "passed over", "refused"}


@pytest.mark.matrix
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_run_ends_well(home: Path, tmp_path: Path, damage: Damage) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    damage.change(run)
    before = contents(run)
    ended = train_here(home / "run.yaml", f"run.dir={run}", f"training.steps={STEPS + 1}")
    assert damage.names in ended.printed, ended.printed
    assert "\x1b" not in ended.printed and "Traceback" not in ended.printed
    if damage.ends == "refused":
        assert ended.code == 2, ended.printed
        # Records of bad samples are read once the configuration has been written.
        now = contents(run)
        assert all(now.get(name) == data for name, data in before.items() if name != "config.yaml")
        return
    assert ended.code == 0, ended.printed
    assert ("step-000003 is passed over" in ended.printed) == (damage.ends == "passed over"), ended.printed
    came_from = 2 if damage.ends == "passed over" else 3
    assert f"resuming after step {came_from} from" in ended.printed
    as_uninterrupted(run, home / "longer", damage)
    write_report(run)


def as_uninterrupted(run: Path, longer: Path, damage: Damage) -> None:
    """Bit for bit the weights, optimizer states and rewards of the run that was never damaged."""
    for file in ("model.safetensors", STATES):
        path = f"checkpoints/step-00000{STEPS + 1}/{file}"
        assert (run / path).read_bytes() == (longer / path).read_bytes(), file
    expected = {line["step"]: line["reward"] for line in read_lines(longer / "metrics.jsonl")}
    found = [parse_json_line(line) for line in (run / "metrics.jsonl").open("rb")]
    rewards = {
        line["step"]: line["reward"] for line in found if line and "grad_norm" in line and line["step"] in expected
    }
    if not damage.name.startswith("metrics.jsonl"):
        assert rewards == expected
    assert rewards[STEPS + 1] == expected[STEPS + 1]
