"""The stages and plans as they are listed, packages carried along, and the programs that stages run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.bench.gpu_check import kernels
from scripts.bench.gpu_check.__main__ import main
from scripts.bench.gpu_check.grpo_step import measure
from scripts.bench.gpu_check.machine import install_wheels, installed, missing_words
from scripts.bench.gpu_check.stages import PLANS, Measurement, as_begun, check, paper_commands
from vlm_pg.errors import ConfigError


def test_the_check_on_a_gpu_has_both_models_and_all_that_was_asked_for(tmp_path: Path) -> None:
    stages = check(tmp_path, "cuda", ("7b", "8b"))
    assert [stage.name for stage in stages] == [
        "environment", "tests", "kernels", "training-fp32", "training-bf16",
        "step-7b", "rollout-7b", "step-8b", "rollout-8b", "counted",
    ]  # fmt: skip
    step = next(stage for stage in stages if stage.name == "step-8b").commands[0]
    assert "--checkpointing" in step and step[step.index("--dtype") + 1] == "bf16"
    on_cpu = check(tmp_path, "cpu", ("small",))
    assert [stage.name for stage in on_cpu if stage.needs_gpu] == ["tests", "training-bf16"]


def test_a_file_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    command = Measurement("step", "7b", "4096,8,512", ("grouped",)).command(tmp_path / "training.json", "cuda")
    assert "--resume" not in as_begun(command) and "{" not in "".join(as_begun(command))
    (tmp_path / "training.json").write_text("{}")
    assert as_begun(command)[-1] == "--resume"


def test_bench_takes_every_command_of_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parsers, so that a renamed option or contestant is found without a GPU."""
    from scripts.bench.others import StepRun
    from scripts.bench.paper import parser, specifications
    from vlm_pg.bench.rollout import RolloutRun

    stages = [stage for _, make in PLANS.values() for stage in make(tmp_path, "cuda", "7b")]
    stages += check(tmp_path, "cuda", ("7b", "8b")) + check(tmp_path, "cpu", ("small",))
    parsed, counted = 0, []
    for command in (as_begun(command) for stage in stages for command in stage.commands):
        if "scripts.bench.paper" in command:
            words = parser().parse_args(command[command.index("scripts.bench.paper") + 1 :])
            counted.append(len(specifications(words)))
        elif "scripts.bench.others" in command:
            arguments = StepRun.parser().parse_args(command[command.index("scripts.bench.others") + 1 :])
            parsed += len(StepRun.points(arguments))
        elif "rollout" in command:
            arguments = RolloutRun.parser().parse_args(command[command.index("rollout") + 1 :])
            parsed += len(RolloutRun.points(arguments))
    assert parsed == 5 + 6 + 4 + 2
    for plan, points in (("training", 5), ("rollouts", 6), ("grpo-step", 5)):  # each a stage of its own
        alone = [one for one in PLANS[plan][1](tmp_path, "cuda", "7b") if one.least_seconds and one.name != "counted"]
        assert len(alone) == points == len({one.name for one in alone}) and all(one.needs_gpu for one in alone)
    # Points times contestants: two plans, 7b and 8b, small.
    assert counted == [5 * 4, 6 * 2, 3 + 2, 3 + 2, 3 + 2]


def test_what_is_measured_is_counted_with_the_same_settings(tmp_path: Path) -> None:
    measured = [
        Measurement("step", "7b", "4096,8,512", ("grouped", "transformers-batch"), checkpointing=True),
        Measurement("step", "7b", "8192,8,512", ("grouped",), checkpointing=True),
        Measurement("rollout", "7b", "4096,8,128", ("ours",)),
        Measurement("rollout", "small", "64,2,4", ("ours",)),
    ]
    large, little = (" ".join(command) for command in paper_commands(tmp_path, measured, "cpu"))
    assert large.endswith(
        "scripts.bench.paper --models 7b --dtype bf16 --points 4096,8,512 8192,8,512 --rollout-points "
        f"4096,8,128 --contestants grouped transformers-batch ours --checkpointing --out {tmp_path}/paper-7b.json"
    )
    assert little.endswith(
        "scripts.bench.paper --models small --dtype fp32 --rollout-points 64,2,4 --contestants ours "
        f"--out {tmp_path}/paper-small.json"
    )
    if find_spec("liger_kernel"):  # which a GPU's policies run on by default
        assert "--liger" in paper_commands(tmp_path, measured, "cuda")[0]


def make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_are_carried_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path, "carried_along")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    site = install_wheels(tmp_path)
    assert (site / "carried_along/__init__.py").is_file()
    monkeypatch.syspath_prepend(str(site))
    assert installed()["carried-along"] == "1.0"
    assert missing_words(["qwen_vl_utils", "av"]).startswith("qwen-vl-utils, av are not installed.")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is no file \*\.whl"):
        install_wheels(tmp_path / "empty")
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(ConfigError, match="pip could not install them"):
        install_wheels(tmp_path)


def test_listing_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--plan", "training", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "--points 32768,8,512" in printed and "{--resume}" not in printed and not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, words", [
    (["--only", "nothing"], "--only got nothing; the stages are environment, tests"),
    (["--wheels", "no/such/folder"], "--wheels got"),
])  # fmt: skip
def test_options_that_cannot_be(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_kernel_that_is_wrong_fails_and_the_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HEADS", [(4, 2, 16), (2, 1, 16)])
    path = tmp_path / "kernels.json"
    assert kernels.main(["cpu", "fp32", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["chosen"] == "cpu-flash" and "it runs on CUDA" in found["not_here"]["cuda-flash"]
    assert [check["heads"] for check in found["checks"]] == [[4, 2, 16], [2, 1, 16]]
    assert all(check["worst"] < 1e-4 for check in found["checks"])

    def differs(_kernel: object, _device: object, _dtype: object, num_heads: int, *_: int) -> float:
        if num_heads == 4:
            raise RuntimeError("differs by 1.0")
        return 0.0

    monkeypatch.setattr(kernels, "check_kernel", differs)
    assert kernels.main(["cpu", "fp32", str(path)]) == 1
    assert [check.get("failed") for check in json.loads(path.read_text())["checks"]] == [
        "RuntimeError: differs by 1.0",
        None,
    ]


def test_a_whole_step_trains_on_what_it_sampled() -> None:
    found = measure(frames=4, model="small", device="cpu", generations=2, new_tokens=4)
    # Two pairs of frames of 16 x 32 patches, four patches a token, and 12 words.
    assert found["prompt_tokens"] == 2 * 128 + 12 and found["sampled_tokens"] == 2 * 4
    assert set(found["seconds"]) == {"vision", "rollout", "update", "step"} and found["grad_norm"] > 0


def test_the_orchestrator_imports_nothing_that_may_lack() -> None:
    code = "import sys, scripts.bench.gpu_check.__main__; print({'torch', 'pydantic', 'jinja2'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
