"""One of two ranks is killed in any phase: it is named, the others end, nothing is left behind, and the run goes on."""

from __future__ import annotations

import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.integration.test_sequence_runs import sections
from tests.support.processes import launch_ranks, start_ranks
from tests.support.runs import ROOT, read_lines, write_config
from vlm_pg.errors import EXIT_RANK_LOST

STEPS = 3
# And the steps that are completed when it begins.
PHASES = {
    "setup": 0,
    "eval_before": 0,
    "prompts": 1,
    "vision": 1,
    "rollout": 0,
    "rewards": 2,
    "reference": 1,
    "train": 1,
    "checkpoint": 2,
    "eval_after": 3,
}
ENGINES = {"torch": 0, "zero2": 2, "zero3": 3}
EVERYWHERE = [(engine, phase, rank) for engine in ("torch", "zero2") for phase in PHASES for rank in (0, 1)]
SAMPLE = [("torch", "rollout", 1), ("torch", "checkpoint", 0), ("zero3", "train", 1)]
# Within which all processes of a run are gone: what is promised. It takes about six.
GONE_SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dying")
    prepare_embedded(["--out", str(path / "clips"), "--train", "12", "--eval", "4"])
    values = sections(path, ROOT / "assets/tiny-qwen2_5-vl")
    values["training"] |= {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 9}
    values["model"]["train_vision"] = False
    values["algorithm"] = {"kl_coef": 0.1}
    values["data"]["eval"] = {"seen": str(path / "clips" / "eval_seen.jsonl")}
    values["eval"] = {"controls": [], "control_sets": [], "headline_set": None}
    values["rollout"] = {"num_generations": 2, "max_new_tokens": 8}
    write_config(path / "run.yaml", values)
    return path


def arguments(folder: Path, engine: str, run: Path) -> list[str]:
    deepspeed: list[str] = []
    if ENGINES[engine]:
        file = deepspeed_config(folder, ENGINES[engine])
        deepspeed = ["training.engine=deepspeed", f"training.deepspeed_config={file}"]
    return [str(folder / "run.yaml"), f"run.dir={run}", *deepspeed]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Path]:
    """Runs by engine, made when they are asked for."""
    return {}


def weights(run: Path) -> dict[str, object]:
    return load_file(run / f"checkpoints/step-{STEPS:06d}/model.safetensors")


def left_behind(mark: str) -> Iterator[int]:
    """Processes that were started by one whose environment holds the mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has gone meanwhile
            continue


@pytest.mark.parametrize(
    "engine, phase, rank",
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.matrix) for case in EVERYWHERE if case not in SAMPLE)],
)
def test_a_killed_rank_is_named_and_ends_all(
    engine: str, phase: str, rank: int, folder: Path, undisturbed: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine not in undisturbed:
        undisturbed[engine] = folder / f"{engine}-whole"
        launch_ranks("vlm_pg.cli", "train", *arguments(folder, engine, undisturbed[engine]))
    run, mark = folder / f"{engine}-{phase}-{rank}", uuid.uuid4().hex
    monkeypatch.setenv("MARK_OF_THIS_TEST", mark)
    of_run = arguments(folder, engine, run)
    ranks = start_ranks(
        "tests.integration.dying_rank", str(rank), phase, str(PHASES[phase]), *of_run, "media.workers=1"
    )
    ranks[rank].finish(timeout_seconds=120)
    died_seconds = time.monotonic()
    done = [one.finish(timeout_seconds=GONE_SECONDS) for one in ranks]
    while list(left_behind(mark)):
        assert time.monotonic() - died_seconds < GONE_SECONDS
        time.sleep(0.1)
    print(f"{engine}, {phase}, rank {rank}: all gone after {time.monotonic() - died_seconds:.1f} s")
    said = "".join(one.stdout + one.stderr for one in done)
    assert done[rank].returncode == -signal.SIGKILL, said
    assert done[1 - rank].returncode == EXIT_RANK_LOST, said
    lines = [line for line in said.splitlines() if "has gone" in line]
    assert len(lines) == 1, said
    assert lines[0].startswith(f"vlm-pg: error: rank {rank} (host {socket.gethostname()}, process "), said
    assert f'has gone in phase "{phase}"' in lines[0] and "run.resume=auto" in lines[0], said
    assert phase == "setup" or f"after step {PHASES[phase]}" in lines[0] or not PHASES[phase], said
    assert "Traceback" not in said, said
    launch_ranks("vlm_pg.cli", "train", *of_run, "run.resume=auto")
    found, expected = weights(run), weights(undisturbed[engine])
    assert found.keys() == expected.keys()
    assert all((found[name] == weight).all() for name, weight in expected.items())  # type: ignore[attr-defined]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
