"""What logs and files of stages say, also those of killed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.gpu_check.reading import (
    last_words,
    log_lines,
    read_bench_point,
    read_environment,
    read_kernels,
    read_tests,
    read_training,
)

PYTEST = """\
$ python -m pytest -v -rfE tests/gpu
============================= test session starts ==============================
collecting ... collected 5 items

tests/gpu/test_cuda.py::test_kernels[flash-attn-3-bf16 two levels] SKIPPED [ 20%]
tests/gpu/test_cuda.py::test_kernels[cuda-flash] PASSED                  [ 40%]
tests/gpu/test_cuda.py::test_bf16_is_no_worse FAILED                     [ 60%]
tests/gpu/test_graphs.py::test_replayed ERROR                            [ 80%]
tests/gpu/test_graphs.py::test_memory PASSED                             [100%]

=================================== FAILURES ===================================
E   assert 2.0 <= 1.5
=========================== short test summary info ============================
FAILED tests/gpu/test_cuda.py::test_bf16_is_no_worse - assert 2.0 <= 1.5
ERROR tests/gpu/test_graphs.py::test_replayed - RuntimeError: no graph
========= 1 failed, 2 passed, 1 skipped, 1 error in 3.21s =========
"""
KILLED = """\
tests/gpu/test_cuda.py::test_kernels[cuda-flash] PASSED                  [ 40%]
tests/gpu/test_long_streams.py::test_on_a_gpu[all-chunks] """


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_tests_are_counted_with_the_reasons_of_those_that_failed(tmp_path: Path) -> None:
    reading = read_tests(written(tmp_path / "log", PYTEST))
    assert reading.figures == {
        "counts": {"skipped": 1, "passed": 2, "failed": 1, "error": 1},
        "failed": {
            "tests/gpu/test_cuda.py::test_bf16_is_no_worse": "assert 2.0 <= 1.5",
            "tests/gpu/test_graphs.py::test_replayed": "RuntimeError: no graph",
        },
    }
    assert reading.problem == "2 of 5 tests failed, the first: tests/gpu/test_cuda.py::test_bf16_is_no_worse"
    reading = read_tests(written(tmp_path / "log", KILLED))
    assert reading.figures["counts"] == {"passed": 1} and not reading.problem
    running = "tests/gpu/test_long_streams.py::test_on_a_gpu[all-chunks]"
    assert reading.remarks == [f"when time was up, {running} was running"]
    skipped = "tests/gpu/test_cuda.py::test_kernels SKIPPED (no GPU) [100%]\n"
    assert read_tests(written(tmp_path / "log", skipped)).problem == "no test passed"
    assert read_tests(tmp_path / "no log").problem == "no test passed"


@pytest.mark.parametrize(
    "log, words",
    [
        ("start\nvlm-pg: error: the model is not there.\nbye\n", "vlm-pg: error: the model is not there."),
        ("ValueError: first\nduring it\nKeyError: 'second'\n", "KeyError: 'second'"),
        ("half a line\rthe other half\n", "the other half"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_last_words(tmp_path: Path, log: str, words: str) -> None:
    assert last_words(written(tmp_path / "log", log)) == words
    (tmp_path / "log").write_bytes(b"good\n\xff\xfe\n")
    assert log_lines(tmp_path / "log") == ["good", "\ufffd\ufffd"]


def run_folder(tmp_path: Path, steps: list[dict[str, Any]], after: dict[str, float] | None) -> Path:
    lines = [{"phase": "eval", "step": 0}, *({"phase": "train", **step} for step in steps)]
    written(tmp_path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "tr')
    sets = {"sets": {name: {"accuracy": value} for name, value in (after or {}).items()}}
    written(tmp_path / "summary.json", json.dumps({"eval_after": sets, "attention_kernel": "cuda-flash"}))
    return tmp_path


def step(number: int, loss: Any = 0.1, grad_norm: Any = 0.5) -> dict[str, Any]:
    return {"step": number, "loss": loss, "grad_norm": grad_norm, "reward": 0.2}


@pytest.mark.parametrize(
    "steps, after, problem",
    [
        ([step(1, loss=0.0), step(2, grad_norm=0.0)], {"seen": 0.25}, ""),
        ([step(1)], {"seen": 0.5}, "1 of 2 steps were made"),
        ([step(1), step(2, loss=float("nan"))], {"seen": 0.5}, "loss of step 2 is nan, not a finite number"),
        ([step(1, grad_norm=0.0), step(2, grad_norm=0.0)], {"seen": 0.5}, "the gradient of every step is 0"),
        ([step(1), step(2)], None, "accuracy after training was not measured"),
    ],
)
def test_training_that_is_as_it_should_be_and_that_is_not(
    tmp_path: Path, steps: list[Any], after: Any, problem: str
) -> None:
    reading = read_training(run_folder(tmp_path, steps, after), 2)
    assert reading.problem == problem
    if not problem:
        assert [one["loss"] for one in reading.figures["steps"]] == [0.0, 0.1]
        assert reading.figures["accuracy_after"] == after
    never = read_training(tmp_path / "nothing", 4)
    assert never.problem == "0 of 4 steps were made; accuracy after training was not measured"


BENCH = {
    "measurement": "step",
    "settings": {"model": "7b"},
    "points": [
        {"prefix": 4096, "generations": 8, "response": 512, "contestants": {"grouped": {}}, "failed": {"other": "OOM"}},
        {"prefix": 8192, "generations": 8, "response": 512, "contestants": {}, "failed": {"grouped": "OOM"}},
    ],
    "skipped": [{"prefix": 4096, "generations": 8, "response": 512, "contestant": "other", "reason": "OOM"}],
}


def test_others_that_cannot_run_are_remarks_and_ours_must(tmp_path: Path) -> None:
    path = written(tmp_path / "step.json", json.dumps(BENCH))
    first = read_bench_point(path, "4096,8,512", "grouped")
    assert read_bench_point(tmp_path / "none.json", "1,1,2", "grouped").problem == "it wrote no result"
    assert not first.problem and first.remarks == ["other: OOM"] and len(first.figures["points"]) == 1
    assert read_bench_point(path, "8192,8,512", "grouped").problem == "ours failed: OOM"
    assert read_bench_point(path, "16384,8,64", "grouped").problem == "it was not measured"


def test_kernels_that_differ_are_named(tmp_path: Path) -> None:
    checks = [
        {"kernel": "a", "heads": [28, 4, 128], "worst": 1e-3},
        {"kernel": "b", "heads": [28, 4, 128], "failed": "RuntimeError: differs"},
    ]
    found = {"checks": checks, "not_here": {"c": "it runs on Hopper"}}
    reading = read_kernels(written(tmp_path / "k.json", json.dumps(found)))
    assert reading.problem == "b at heads [28, 4, 128]: RuntimeError: differs"
    assert reading.remarks == ["c does not run here: it runs on Hopper"]


def test_what_lacks_is_said_once_with_what_does_not_work_without_it(tmp_path: Path) -> None:
    found = {
        "findings": [
            {"name": "deepspeed", "status": "missing", "detail": "not installed", "remedy": "x"},
            {"name": "numpy", "status": "missing", "detail": "1.0, which is not >=2.4", "remedy": "x"},
        ],
        "not_installed": {"deepspeed": "no training.engine=deepspeed"},
        "device": {"type": "cpu"},
    }
    reading = read_environment(written(tmp_path / "e.json", json.dumps(found)))
    assert reading.remarks == [
        "numpy: 1.0, which is not >=2.4",
        "deepspeed is not installed: no training.engine=deepspeed",
    ]
