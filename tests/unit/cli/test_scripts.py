"""The shell scripts set up once and hand their arguments to the right command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).parents[3]
# Commands that print what they were called with, in place of the real ones.
STUB = '#!/bin/bash\necho "$(basename "$0") $*"\n'
PYTHON_STUB = '#!/bin/bash\ncat >/dev/null\necho "${FAKE_ENGINE:-torch}"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is complete and full of stubs."""
    root = tmp_path / "check out"
    (root / ".venv/bin").mkdir(parents=True)
    shutil.copytree(REPO_ROOT / "scripts", root / "scripts")
    (root / "configs").mkdir()
    (root / "configs/mine.yaml").write_text("")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPO_ROOT / name, root)
    for name in ("vlm-pg", "deepspeed", "python"):
        stub = root / ".venv/bin" / name
        stub.write_text(PYTHON_STUB if name == "python" else STUB)
        stub.chmod(0o755)
    run(root, "-c", '. scripts/setup.sh; _fingerprint >"$STAMP"')
    return root


def run(root: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE")}
    done = subprocess.run(
        ["bash", *arguments], cwd=cwd or root, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(root: Path, *arguments: str, gpus: str = "", **environment: str) -> list[str]:
    return run(root, "scripts/train_video.sh", *arguments, CUDA_VISIBLE_DEVICES=gpus, **environment).splitlines()


@pytest.mark.parametrize("overrides", [[], ["training.steps=5", "run.seed=1"]])
@pytest.mark.parametrize("gpus", ["", "0,1"])
def test_without_a_config_the_embedded_default_is_prepared_and_trained(
    checkout: Path, overrides: list[str], gpus: str
) -> None:
    assert train(checkout, *overrides, gpus=gpus) == [
        "vlm-pg prepare embedded --out data/embedded",
        " ".join(["vlm-pg train configs/embedded.yaml", *overrides]),
    ]


@pytest.mark.parametrize("name", ["embedded.yaml", "algorithms/cppo.yaml"])
def test_a_config_of_the_embedded_task_has_its_data_prepared_first(checkout: Path, name: str) -> None:
    path = checkout / "configs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert train(checkout, f"configs/{name}", "training.steps=5") == [
        "vlm-pg prepare embedded --out data/embedded",
        f"vlm-pg train {path} training.steps=5",
    ]


@pytest.mark.parametrize("gpus", ["", "0", "-1", "-1,0"])
def test_a_config_on_at_most_one_gpu_is_trained_in_this_process(checkout: Path, gpus: str) -> None:
    path = checkout / "configs/mine.yaml"
    assert train(checkout, "configs/mine.yaml", "training.steps=5", gpus=gpus) == [
        f"vlm-pg train {path} training.steps=5"
    ]


def test_a_config_on_several_gpus_starts_deepspeed(checkout: Path) -> None:
    path = checkout / "configs/mine.yaml"
    assert train(checkout, "configs/mine.yaml", "a.b=5", gpus="2,3", FAKE_ENGINE="deepspeed") == [
        "Starting DeepSpeed on 2 GPUs",
        f"deepspeed --no_local_rank --module vlm_pg.cli train {path} a.b=5",
    ]


def test_a_torch_config_on_several_gpus_gets_zero_2_and_says_so(checkout: Path) -> None:
    added = "training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json"
    assert train(checkout, "configs/mine.yaml", gpus="0,1,2") == [
        f"3 GPUs: adding {added}",
        "Starting DeepSpeed on 3 GPUs",
        f"deepspeed --no_local_rank --module vlm_pg.cli train {checkout / 'configs/mine.yaml'} {added}",
    ]
    assert (REPO_ROOT / "configs/deepspeed/zero2.json").is_file()


def test_an_engine_that_was_asked_for_is_kept(checkout: Path) -> None:
    lines = train(checkout, "configs/mine.yaml", "training.engine=torch", gpus="0,1")
    assert lines[-1] == f"vlm-pg train {checkout / 'configs/mine.yaml'} training.engine=torch"


def test_inside_a_launcher_no_second_one_is_started(checkout: Path) -> None:
    assert train(checkout, "configs/mine.yaml", gpus="0,1", WORLD_SIZE="16")[0].startswith("vlm-pg train ")


def test_paths_are_relative_to_where_the_user_stands(checkout: Path) -> None:
    elsewhere = checkout.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my config.yaml").write_text("")
    script = str(checkout / "scripts/train_video.sh")
    out = run(checkout, script, "my config.yaml", cwd=elsewhere, CUDA_VISIBLE_DEVICES="")
    assert out == f"vlm-pg train {elsewhere / 'my config.yaml'}\n"
    script = str(checkout / "scripts/eval_video.sh")
    out = run(checkout, script, "my config.yaml", "eval.limit=5", cwd=elsewhere)
    assert out == f"vlm-pg eval {elsewhere / 'my config.yaml'} eval.limit=5\n"


def test_eval_without_arguments(checkout: Path) -> None:
    assert run(checkout, "scripts/eval_video.sh") == "vlm-pg eval\n"


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_dependencies_are_installed_anew(checkout: Path, changed: str) -> None:
    is_installed = ". scripts/setup.sh; if _is_installed; then echo yes; else echo no; fi"
    assert run(checkout, "-c", is_installed) == "yes\n"
    (checkout / changed).write_text("# changed\n")
    assert run(checkout, "-c", is_installed) == "no\n"


def test_an_interrupted_set_up_is_repeated(checkout: Path) -> None:
    failing = ". scripts/setup.sh; _install() { return 1; }; (set -e; set_up_environment); _is_installed || echo again"
    (checkout / "constraints.txt").write_text("# changed\n")
    assert run(checkout, "-c", failing).splitlines()[-1] == "again"


def test_no_usable_python_is_said_with_the_remedy(checkout: Path) -> None:
    (checkout / ".venv/bin/python").unlink()
    script = ". scripts/setup.sh; PYTHON=/no/such/python; set_up_environment 2>&1 || true"
    out = run(checkout, "-c", script)
    assert "No usable Python was found (looked for: /no/such/python).\nNeeded is Python 3.11 or newer" in out
    assert "apt-get install python3 python3-venv" in out


@pytest.mark.parametrize("script", ["train_video.sh", "eval_video.sh"])
def test_help_sets_nothing_up(checkout: Path, script: str) -> None:
    shutil.rmtree(checkout / ".venv")
    out = run(checkout, f"scripts/{script}", "--help")
    assert f"bash scripts/{script}" in out
    assert not (checkout / ".venv").exists()
