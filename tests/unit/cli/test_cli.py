"""The command parses, dispatches and exits as its help says, and its help loads nothing heavy."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from vlm_pg import cli
from vlm_pg.config import RunConfig
from vlm_pg.training.checkpoints import begin, commit
from vlm_pg.training.setup import allocator_line

CONFIG = "model: {path: some/model}\ntraining: {steps: 3}\n"
HEAVY = ("torch", "transformers", "numpy", "av", "decord", "deepspeed", "PIL", "pyarrow", "rich", "pydantic", "yaml")


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module with the given attributes in place of a heavy one."""

    def install(name: str, **attributes: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "c.yaml").write_text(CONFIG)
    return str(tmp_path / "c.yaml")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with a config and one checkpoint."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(CONFIG)
    save_checkpoint(tmp_path / "run", 3)
    return tmp_path / "run"


def save_checkpoint(run_dir: Path, step: int) -> Path:
    temporary = begin(run_dir / "checkpoints", step)
    (temporary / "config.json").write_text("{}")
    return commit(temporary, step, {})


@pytest.fixture
def evaluated(fake_module: Callable[..., None]) -> list[tuple[Any, Path | None]]:
    """What ``evaluate`` was called with."""
    calls: list[tuple[Any, Path | None]] = []
    fake_module("vlm_pg.eval.main", evaluate=lambda config, checkpoint: calls.append((config, checkpoint)))
    return calls


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom vlm_pg.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as exit:\n    assert exit.code == 0\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\nassert not heavy, heavy\n"
        "ours = {name for name in sys.modules if name.startswith('vlm_pg.')}\n"
        "assert ours == {'vlm_pg.cli', 'vlm_pg.errors'}, ours\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("train", "prepare", "eval", "report", "bench", "doctor", "exit codes"):
        assert command in done.stdout


def test_reading_a_config_imports_neither_torch_nor_a_decoder(config: str) -> None:
    script = (
        f"import sys\nfrom vlm_pg.config import load_config\nload_config({config!r})\n"
        "heavy = [n for n in ('torch', 'transformers', 'numpy', 'av', 'decord', 'PIL') if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_train_gets_the_config_with_its_overrides_and_returns_the_exit_code(
    config: str, fake_module: Callable[..., None]
) -> None:
    calls: list[Any] = []
    fake_module("vlm_pg.training.main", train=lambda config: calls.append(config) or 130)
    assert cli.main(["train", config, "training.steps=5", "run.name=x"]) == 130
    assert [(call.training.steps, call.run.name) for call in calls] == [(5, "x")]


def test_an_error_of_the_user_is_one_message_of_its_rank_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", str(tmp_path / "absent.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vlm-pg: error: The config file") and "Traceback" not in error
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["train", str(tmp_path / "absent.yaml")]) == 2
    assert capsys.readouterr().err.startswith("[rank 3] vlm-pg: error: ")


def test_a_bug_raises_and_an_exhausted_gpu_is_none(
    config: str, fake_module: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    fake_module("vlm_pg.training.main", train=Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train", config])
    exhausted = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    fake_module("vlm_pg.training.main", train=Mock(side_effect=exhausted))
    assert cli.main(["train", config]) == 1
    error = capsys.readouterr().err
    assert "Tried to allocate 2.00 GiB" in error and "vlm-pg: error: The GPU's memory ran out" in error
    # What it advises exists.
    for section, key in re.findall(r"(training|model|rollout)\.(\w+)", error.partition("vlm-pg: error")[2]):
        assert key in RunConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_sets_the_allocator(
    name: str, config: str, fake_module: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for each in names:
        monkeypatch.setenv(each, "")  # so that what it is now comes back
        monkeypatch.delenv(each)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    found: list[dict[str, str]] = []
    fake_module("vlm_pg.training.main", train=lambda config: found.append(dict(os.environ)) or 0)
    assert cli.main(["train", config]) == 0
    settings = {each: found[0][each] for each in names if each in found[0]}
    assert settings == ({name: "max_split_size_mb:512"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert all(f"{each}={value}" in allocator_line() for each, value in settings.items())


def test_files_of_the_run_may_vanish_and_others_are_bugs(
    config: str, tmp_path: Path, fake_module: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "run" / "metrics.jsonl"
    command = ["train", config, f"run.dir={tmp_path}/run"]
    fake_module("vlm_pg.training.main", train=lambda config: missing.read_text())
    assert cli.main(command) == 2
    assert f"{missing} cannot be used: No such file or directory. Put it back, then go on" in capsys.readouterr().err
    fake_module("vlm_pg.training.main", train=lambda config: subprocess.run(["no-such-program"]))
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        cli.main(command)


def test_a_full_disk_gives_no_advice_about_training_where_nothing_trains(
    run_dir: Path, fake_module: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "result.json")
    fake_module("vlm_pg.eval.main", evaluate=Mock(side_effect=full))
    assert cli.main(["eval", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert error.endswith("result.json cannot be used: No space left on device. Make room on that disk.\n")


def test_exit_code_after_ctrl_c(
    run_dir: Path, fake_module: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_module("vlm_pg.observe.report.page", write_report=Mock(side_effect=KeyboardInterrupt()))
    assert cli.main(["report", str(run_dir)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_report_prints_its_path(
    run_dir: Path, fake_module: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_module("vlm_pg.observe.report.page", write_report=lambda path: path / "report.html")
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    assert cli.main(["report", str(run_dir / "absent")]) == 2
    assert "is not a folder. A report is written from a run's folder. Give one" in capsys.readouterr().err


def test_bench_passes_the_rest_on(fake_module: Callable[..., None]) -> None:
    calls: list[list[str]] = []
    fake_module("vlm_pg.bench.step", main=calls.append)
    assert cli.main(["bench", "step", "--groups", "2", "x"]) == 0
    assert calls == [["--groups", "2", "x"]]


def test_eval_of_a_run_takes_its_newest_checkpoint_and_its_config(run_dir: Path, evaluated: list) -> None:
    save_checkpoint(run_dir, 2)
    (run_dir / "checkpoints/step-000004").mkdir()  # killed before its end
    assert cli.main(["eval", str(run_dir), "eval.limit=7"]) == 0
    [(config, checkpoint)] = evaluated
    assert (config.eval.limit, checkpoint) == (7, run_dir / "checkpoints/step-000003")


@pytest.mark.parametrize("below", ["checkpoints/step-000003", "checkpoints/step-000003/model"])
def test_eval_of_a_checkpoint_finds_the_config_above_it(run_dir: Path, evaluated: list, below: str) -> None:
    (run_dir / below).mkdir(exist_ok=True)
    assert cli.main(["eval", str(run_dir / below)]) == 0
    [(config, checkpoint)] = evaluated
    assert (config.model.path, checkpoint) == ("some/model", run_dir / below)


def test_eval_without_a_target_is_the_embedded_run(
    run_dir: Path, evaluated: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir.parent)
    assert cli.main(["eval"]) == 2
    assert (
        "runs/embedded does not exist. It must be a checkpoint or a run's folder. Run bash" in capsys.readouterr().err
    )
    (run_dir.parent / "runs").mkdir()
    run_dir.rename("runs/embedded")
    assert cli.main(["eval", "eval.limit=7"]) == 0
    assert evaluated[0][1] == Path("runs/embedded/checkpoints/step-000003")
    assert evaluated[0][0].eval.limit == 7


def test_eval_with_a_config_is_of_the_model_it_names_or_of_a_folder(
    run_dir: Path, tmp_path: Path, evaluated: list
) -> None:
    config, model = str(run_dir / "config.yaml"), tmp_path / "model"
    model.mkdir()
    assert cli.main(["eval", "--config", config]) == cli.main(["eval", config]) == 0
    assert cli.main(["eval", str(model), "--config", config, "eval.limit=7"]) == 0
    assert [checkpoint for _, checkpoint in evaluated] == [None, None, model] and evaluated[-1][0].eval.limit == 7


def test_eval_without_a_config_or_a_complete_checkpoint_is_refused(
    run_dir: Path, tmp_path: Path, evaluated: list, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run_dir / "checkpoints/step-000003"
    (checkpoint / "manifest.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    for target, words in (
        (tmp_path / "elsewhere", "lies in no run's folder, so there is no config.yaml"),
        (run_dir, "holds no complete checkpoint. A run saves one at its end"),
        (checkpoint, "is not a complete checkpoint: it has no manifest"),
    ):
        assert cli.main(["eval", str(target)]) == 2
        assert words in capsys.readouterr().err
    assert evaluated == []


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["bench", "steps"], ["train", "c.yaml", "--fast"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: vlm-pg" in capsys.readouterr().err
