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

from tests.support.processes import launch_ranks, start_ranks
from tests.support.runs import deepspeed_config, read_lines
from tests.support.short_run import Ended
from tests.support.small_run import STEPS, small_run
from vlm_pg.errors import EXIT_RANK_LOST

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
# Kills within a checkpoint, of which rank 0 writes all, are in test_resume.py.
SAMPLE = [("torch", "rollout", 1)]
# Within which all processes of a run are gone: what is promised. It takes about six.
GONE_SECONDS = 60

# A user-defined loss in which each rank marks its begin, and acts as the environment says.
LOSS = """\
import os, signal, time

action = os.environ.get("LOSS_OF_RANK_" + os.environ["RANK"], "")
if action.startswith("is missing"):
    time.sleep(2 * action.endswith("late"))
    raise ImportError("a package is missing here")


def odd(tokens, settings):
    open(__file__ + ".begun-" + os.environ["RANK"], "w").close()
    if action == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raises":
        raise ValueError("an odd loss\\nwith more to say")
    while action == "hangs":
        time.sleep(3600)
    return tokens.logprobs.sum() * 0, {}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dying")
    small_run(path)
    (path / "odd.py").write_text(LOSS)
    return path


def arguments(folder: Path, engine: str, run: Path) -> list[str]:
    deepspeed: list[str] = []
    if ENGINES[engine]:
        file = deepspeed_config(folder, ENGINES[engine])
        deepspeed = ["training.engine=deepspeed", f"training.deepspeed_config={file}"]
    return [str(folder / "run.yaml"), f"run.dir={run}", *deepspeed]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Path]:
    """Runs by engine, made on demand."""
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
    printed = "".join(one.stdout + one.stderr for one in done)
    assert done[rank].returncode == -signal.SIGKILL, printed
    assert done[1 - rank].returncode == EXIT_RANK_LOST, printed
    lines = [line for line in printed.splitlines() if "has gone" in line]
    assert len(lines) == 1, printed
    assert lines[0].startswith(f"vlm-pg: error: rank {rank} (host {socket.gethostname()}, process "), printed
    assert f'has gone in phase "{phase}"' in lines[0] and "run.resume=auto" in lines[0], printed
    assert phase == "setup" or f"after step {PHASES[phase]}" in lines[0] or not PHASES[phase], printed
    assert "Traceback" not in printed, printed
    launch_ranks("vlm_pg.cli", "train", *of_run, "run.resume=auto")
    found, expected = weights(run), weights(undisturbed[engine])
    assert found.keys() == expected.keys()
    assert all((found[name] == weight).all() for name, weight in expected.items())  # type: ignore[attr-defined]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))


def odd_ranks(folder: Path, name: str, *more: str, ranks: int = 2) -> list[Ended]:
    """How ranks end of which at least one misbehaves."""
    of_run = arguments(folder, "torch", folder / name)
    running = start_ranks("vlm_pg.cli", "train", *of_run, "eval.before=false", *more, ranks=ranks)
    return [Ended(one.returncode, one.stdout + one.stderr) for one in (rank.finish(120) for rank in running)]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks, rank", [(2, 1), (3, 0)])
def test_ranks_end_whatever_they_wait_in(ranks: int, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No collective tells the others of it: their main threads never get to the next one. One of them says it."""
    for other in range(ranks):
        monkeypatch.setenv(f"LOSS_OF_RANK_{other}", "dies" if other == rank else "hangs")
    ended = odd_ranks(folder, f"hanging-{rank}", f"algorithm.loss={folder / 'odd.py'}:odd", ranks=ranks)
    assert ended.pop(rank).code == -signal.SIGKILL
    assert [one.code for one in ended] == [EXIT_RANK_LOST] * len(ended), ended
    printed = "".join(one.printed for one in ended)
    assert printed.count(f"vlm-pg: error: rank {rank} (host ") == printed.count("vlm-pg: error") == 1, printed
    assert 'has gone in phase "train", before the first step was completed' in printed


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_an_exception_of_one_rank_is_named_by_the_others(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LOSS_OF_RANK_{rank}", "raises")
    monkeypatch.setenv(f"LOSS_OF_RANK_{1 - rank}", "hangs")
    ended = odd_ranks(folder, f"raising-{rank}", f"algorithm.loss={folder / 'odd.py'}:odd")
    assert ended[rank].code == 1 and "ValueError: an odd loss\nwith more to say" in ended[rank].printed
    assert "Traceback" in ended[rank].printed and "vlm-pg: error" not in ended[rank].printed
    assert ended[1 - rank].code == EXIT_RANK_LOST and "Traceback" not in ended[1 - rank].printed
    (line,) = [line for line in ended[1 - rank].printed.splitlines() if "vlm-pg: error" in line]
    assert line.startswith(f"vlm-pg: error: rank {rank} (host {socket.gethostname()}, process ")
    assert 'failed in phase "train", before the first step was completed: ValueError: an odd loss. Every rank' in line


@pytest.mark.matrix
@pytest.mark.parametrize("when", ["meeting", "meeting late"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_it_is_connected_is_named(rank: int, when: str, folder: Path) -> None:
    of_run = arguments(folder, "torch", folder / f"{when} {rank}")
    running = start_ranks("tests.integration.dying_rank", str(rank), when, "0", *of_run)
    done = [one.finish(timeout_seconds=60) for one in running]
    assert (done[rank].returncode, done[1 - rank].returncode) == (-signal.SIGKILL, 2), done[1 - rank].stderr
    silent = f"vlm-pg: error: rank {rank} has met the others and sends nothing any more"
    # A rank that is slower than the other's death gets the error of the collective alone.
    met = f"vlm-pg: error: Rank {1 - rank} was left by another one while the 2 processes of this run met"
    assert silent in done[1 - rank].stderr or met in done[1 - rank].stderr


@pytest.mark.matrix
@pytest.mark.parametrize("late", [None, 0, 1])
def test_an_error_of_all_ranks_is_printed_by_each_alone(
    late: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one that knows the other's failure already."""
    for rank in range(2):
        monkeypatch.setenv(f"LOSS_OF_RANK_{rank}", "is missing, late" if rank == late else "is missing")
    for rank, ended in enumerate(odd_ranks(folder, "alike", f"algorithm.loss={folder / 'odd.py'}:odd")):
        assert ended.code == 2, ended.printed
        (line,) = [line for line in ended.printed.splitlines() if "error:" in line]
        assert line.startswith(f"[rank {rank}] vlm-pg: error: ") and "a package is missing" in line, ended.printed


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_all(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LOSS_OF_RANK_{rank}", "is missing")
    ended = odd_ranks(folder, f"missing-{rank}", f"algorithm.loss={folder / 'odd.py'}:odd")
    assert (ended[rank].code, ended[1 - rank].code) == (2, EXIT_RANK_LOST)
    assert ended[rank].printed.startswith(f"[rank {rank}] vlm-pg: error: ") and "a package" in ended[rank].printed
    (line,) = [line for line in ended[1 - rank].printed.splitlines() if "error" in line]
    assert f"rank {rank} (host " in line and 'failed in phase "setup": ConfigError: algorithm.loss names' in line


@pytest.mark.matrix
def test_ranks_that_were_started_differently_are_refused(folder: Path) -> None:
    of_run = arguments(folder, "torch", folder / "different")
    differ = {0: ["training.learning_rate=1e-5"], 1: ["training.learning_rate=2e-5", "media.workers=2"]}
    host = socket.gethostname()
    expected = f"training.learning_rate: 1e-05 on rank 0 ({host}), 2e-05 on rank 1 ({host})"
    for rank, process in enumerate(start_ranks("vlm_pg.cli", "train", *of_run, own=differ)):
        done = process.finish(120)
        assert done.returncode == 2 and "were not started alike" in done.stderr, done.stdout + done.stderr
        assert done.stderr.startswith(f"[rank {rank}] vlm-pg: error: ") and expected in done.stderr
        assert "media.workers" not in done.stderr and "vlm-pg: error: rank" not in done.stderr
    assert not (folder / "different").exists()
