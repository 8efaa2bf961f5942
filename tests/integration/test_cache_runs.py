"""Runs with a cache: equal bit for bit to runs without, and nothing is made twice, by a fill or another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.processes import ModuleProcess
from tests.support.runs import read_lines, run_cli
from tests.support.small_run import STEPS, small_run
from vlm_pg.cache.eviction import entry_files

WEIGHTS = f"checkpoints/step-{STEPS:06d}/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    small_run(path)
    return path


def cli(*arguments: str) -> str:
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def entries(folder: Path) -> dict[str, bytes]:
    return {entry.key: entry.path.read_bytes() for entry in entry_files(folder)}


@pytest.fixture(scope="module")
def filled(folder: Path) -> Path:
    """A cache that was filled before any run."""
    said = cli("cache", "fill", str(folder / "run.yaml"), f"cache.folder={folder / 'filled'}")
    assert "12 of 12 media are kept, 0 cannot be used" in said and "4 of 4 media are kept" in said
    assert "train.jsonl: features of 12 of 12 media are kept (0.000 GiB), 12 of them made now, 0 cannot be us" in said
    return folder / "filled"


def test_a_run_on_a_filled_cache_is_one_without_and_makes_nothing(folder: Path, filled: Path) -> None:
    made = entries(filled)
    for name, cache in (("without-any", []), ("with-filled", [f"cache.folder={filled}"])):
        cli("train", str(folder / "run.yaml"), "media.workers=1", f"run.dir={folder / name}", *cache)
    expected, found = (load_file(folder / name / WEIGHTS) for name in ("without-any", "with-filled"))
    assert all(found[key].equal(value) for key, value in expected.items())
    assert entries(filled) == made


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [0, 1])
def test_kept_frames_change_nothing_and_are_made_once(folder: Path, filled: Path, workers: int) -> None:
    options = [str(folder / "run.yaml"), f"media.workers={workers}"]
    cache = folder / f"cache-{workers}"
    for name in ("without", "first", "second"):
        kept = [] if name == "without" else [f"cache.folder={cache}"]
        cli("train", *options, f"run.dir={folder / f'{name}-{workers}'}", *kept)
        if name == "first":
            written = {entry.key: entry.path.stat().st_mtime_ns for entry in entry_files(cache)}
    expected = load_file(folder / f"without-{workers}" / WEIGHTS)
    for name in ("first", "second"):
        run = folder / f"{name}-{workers}"
        assert all(load_file(run / WEIGHTS)[key].equal(value) for key, value in expected.items())
        same = [(folder / f"{other}-{workers}" / "summary.json") for other in ("without", name)]
        assert len({json.dumps(json.loads(path.read_text())["eval_after"]) for path in same}) == 1
        rewards = [[line["reward"] for line in read_lines(path.parent / "metrics.jsonl")] for path in same]
        assert rewards[0] == rewards[1]
    if workers:
        said = cli("eval", str(folder / "second-1"))
        assert f"visual features: kept in {cache}, 0.2 KiB a visual token" in said
    assert {entry.key: entry.path.stat().st_mtime_ns for entry in entry_files(cache)} == written, (
        "nothing was made again"
    )
    assert entries(cache).items() <= entries(filled).items(), "a fill makes what a run would"


HOSTS = {"oneDNN": "ONEDNN_MAX_CPU_ISA=AVX2", "torch": "ATEN_CPU_CAPABILITY=default", "MKL": "MKL_CBWR=COMPATIBLE"}


@pytest.mark.matrix
@pytest.mark.parametrize("host", HOSTS)
def test_what_another_host_made_is_not_taken(folder: Path, filled: Path, host: str) -> None:
    """Its sums are rounded otherwise. Here it is another by what libraries are told; the same run, without a cache and
    with one that was filled elsewhere, gives the same weights."""
    cache, told = folder / f"of-{host}", dict([HOSTS[host].split("=")])
    shutil.copytree(filled, cache)
    weights = []
    for name, kept in (("without", []), ("with", [f"cache.folder={cache}"])):
        done = run_cli("train", str(folder / "run.yaml"), f"run.dir={folder / f'{host}-{name}'}", *kept, **told)
        assert done.returncode == 0, done.stderr
        weights.append(load_file(folder / f"{host}-{name}" / WEIGHTS))
    assert all(weights[0][name].equal(value) for name, value in weights[1].items())
    assert len(entries(cache)) > len(entries(filled))


@pytest.mark.matrix
def test_several_processes_fill_one_cache(folder: Path, filled: Path) -> None:
    cache = folder / "two"
    options = ["cache", "fill", str(folder / "run.yaml"), f"cache.folder={cache}"]
    ranks = [
        ModuleProcess("vlm_pg.cli", *options, environment={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)
    ]
    said = [rank.finish() for rank in ranks]
    assert [one.returncode for one in said] == [0, 0], said
    assert "6 of 6 media are kept" in said[1].stdout and entries(cache) == entries(filled)


@pytest.mark.matrix
def test_a_tower_that_trains_is_told_of(folder: Path) -> None:
    """By a run and by a fill, both of which keep frames all the same."""
    trains, cache = "model.train=[merger,language]", folder / "trains"
    told = "visual features: not kept in cache.folder (model.train=[merger, language], so they change with every update"
    options = [str(folder / "run.yaml"), trains, f"cache.folder={cache}"]
    assert told in cli("cache", "fill", *options)
    assert told in cli("train", *options, f"run.dir={folder / 'trained'}", "algorithm.kl_coef=0", "training.steps=1")
    assert {entry.kind for entry in entry_files(cache)} == {"frames"}


@pytest.mark.matrix
def test_stats_verify_and_prune(folder: Path, filled: Path) -> None:
    cache = folder / "looked-at"
    cli("cache", "fill", str(folder / "run.yaml"), f"cache.folder={cache}")
    assert cli("cache", "stats", str(cache)).count(" 16 entries") == 2
    bad = next(iter(entry_files(cache))).path
    bad.write_bytes(bad.read_bytes()[:-1])
    said = cli("cache", "verify", str(cache))
    assert f"damaged, removed: {bad}" in said and "31 entries are as they were written, 1 were damaged" in said
    cli("cache", "fill", str(folder / "run.yaml"), f"cache.folder={cache}")
    assert entries(cache) == entries(filled)
    assert "32 entries evicted" in cli("cache", "prune", str(cache), "--max-gb", "0") and not entries(cache)
    for arguments, message in (
        (("stats", str(folder)), "is no cache. The folder that cache.folder names"),
        (("prune", str(cache)), "prune needs --max-gb"),
        (("fill", str(folder / "run.yaml")), "cache.folder is not set"),
        (
            ("fill", str(folder / "run.yaml"), f"cache.folder={cache}", "cache.frames=false", "cache.features=false"),
            "cache.frames is false, and visual features are not kept (cache.features=false). Something to fill",
        ),
    ):
        done = run_cli("cache", *arguments)
        assert done.returncode == 2 and message in done.stderr
