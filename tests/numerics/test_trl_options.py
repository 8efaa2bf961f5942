"""GroupedGRPOTrainer equals TRL's trainer whatever GRPOConfig says, or refuses it when it is built.

Each case trains three steps with both trainers and compares responses, losses, every gradient and all metrics. A
release of TRL with an option that no case sets, and that is in no table of tests/support/trl_cases.py, fails here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests.support.processes import ModuleProcess  # noqa: E402
from tests.support.processor import HAS_AVX512  # noqa: E402
from tests.support.runs import ROOT, save_tiny_model  # noqa: E402
from tests.support.tiny import tiny_model  # noqa: E402
from tests.support.trl import OPTIONS, Recorded  # noqa: E402
from tests.support.trl_cases import BASE, CASES, FOR_VLLM, NO_EFFECT, REFUSED, FakeVLLM, compare, with_fake_vllm  # noqa: E402
from vlm_pg.errors import ConfigError, ModelError  # noqa: E402
from vlm_pg.integrations.trl import GroupedGRPOTrainer, check_trainer  # noqa: E402

FIELDS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
LIBRARY = (ROOT / "docs/library.md").read_text()
# Trains in a process in which nothing has run before: what users have on.
FRESH = ("defaults", "defaults of a mixture" if HAS_AVX512 else "defaults of a mixture in fp32")


def test_every_option_is_tested_or_refused_or_without_effect() -> None:
    """Tested: some case sets it to something else than its default."""
    settings = [OPTIONS | BASE | case.settings for case in CASES.values()]
    tested = {name for values in settings for name, value in values.items() if value != FIELDS[name].default}
    others = [*FOR_VLLM, *REFUSED, *NO_EFFECT]
    assert len(others) == len(set(others)) and set(others) <= set(FIELDS)
    assert set(FIELDS) - set(others) <= tested and not tested & {*FOR_VLLM, *REFUSED}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.default_suite])
def test_training_equals_trls(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path)


def in_a_fresh_process(*arguments: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.matrix
def test_the_defaults_in_fresh_processes(tmp_path: Path) -> None:
    """Without AVX-512 bf16 kernels round otherwise (a mixture's 2.3 times as TRL's own): that one is in the table."""
    for name in FRESH:
        done = ModuleProcess("tests.support.trl_cases", name, str(tmp_path / name)).finish()
        assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_training_equals_trls_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    assert in_a_fresh_process("-m", "tests.support.trl_cases", name, str(tmp_path)).endswith("equal\n")


@pytest.mark.matrix
def test_zero_two_trains_the_same(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = in_a_fresh_process("-m", "tests.numerics.trl_zero", str(tmp_path), str(port))
    assert printed.endswith("equal\n")


def test_the_documented_example_trains(tmp_path: Path) -> None:
    """Word by word, at TRL's defaults, where nothing has been imported or checked before."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL) if "GroupedGRPOTrainer" in b]
    save_tiny_model(tmp_path / "model")
    example = tmp_path / "example.py"
    example.write_text(block.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(tmp_path / "model")))
    printed = in_a_fresh_process(str(example), cwd=tmp_path)
    assert "responses of 2 prompt(s) through the model as" in printed
    assert "train_loss" in printed


def test_vllm_gets_what_trl_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fake_vllm(monkeypatch)
    settings = FOR_VLLM | {"use_vllm": True, "vllm_importance_sampling_correction": False}
    requested = []
    for kind in (trl.GRPOTrainer, GroupedGRPOTrainer):
        vllm: FakeVLLM = Recorded(kind, tmp_path, **settings).trainer.vllm_generation
        requested.append({name: value for name, value in vllm.settings.items() if isinstance(value, int | float | str)})
    assert requested[0] == requested[1]
    assert {"mode": "server", "server_port": 1, "max_model_length": 64}.items() <= requested[0].items()


REFUSALS: dict[str, Any] = {
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "use_liger_kernel": True,
    "fp16": True,
    "fp16_full_eval": True,
    "fsdp": [True],
    "parallelism_config": SimpleNamespace(tp_size=2),
    "deepspeed": SimpleNamespace(zero_stage=3),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_equal_is_refused(name: str, tmp_path: Path) -> None:
    args = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    model = tiny_model()
    check_trainer(args, model)
    # Set afterwards: most of them ask for a device or a launcher.
    setattr(args, "deepspeed_plugin" if name == "deepspeed" else name, REFUSALS[name])
    with pytest.raises(ConfigError, match=f"cannot take {name}.*Leave it out, or use TRL's GRPOTrainer"):
        check_trainer(args, model)


def test_the_documentation_lists_what_is_refused() -> None:
    assert [name for name in REFUSED if f"`{name}`" not in LIBRARY] == []


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"preserve_rng_state": False}])
def test_reentrant_checkpointing_is_refused_when_the_trainer_is_built(options: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    with pytest.raises(ConfigError, match="without use_reentrant=False"):
        Recorded(GroupedGRPOTrainer, tmp_path, **settings)


def test_a_list_that_forgets_the_image_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without the image token .*; add \d+"):
        Recorded(GroupedGRPOTrainer, tmp_path, generation_kwargs={"suppress_tokens": [5]})


@pytest.mark.parametrize(("disabled", "more"), [(True, "reaches the dropout modules of a model only"), (False, "")])
def test_attention_dropout_is_refused_when_the_trainer_is_built(disabled: bool, more: str, tmp_path: Path) -> None:
    model = tiny_model(attention_dropout=0.1)
    model.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(ModelError, match=f"attention_dropout=0.1.*{more}"):
        Recorded(GroupedGRPOTrainer, tmp_path, trainer={"model": model}, disable_dropout=disabled)


@pytest.mark.matrix
def test_images_from_tools_are_scored_as_trl_scores_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, _ = compare(CASES["tools that return images"], tmp_path)
    assert capsys.readouterr().out.count("as TRL sends them") == 1
    assert any("vlm_pg/rows_not_grouped" in entry for entry in ours.trainer.state.log_history)


def test_the_models_attention_is_what_it_was(tmp_path: Path) -> None:
    """Between scorings, and before the backward that recomputes layers, the configuration is the trainer's own."""
    trainer = Recorded(GroupedGRPOTrainer, tmp_path, activation_checkpointing=True).trainer
    trainer.model.set_attn_implementation("eager")
    seen = []
    backward = trainer.accelerator.backward

    def look(loss: torch.Tensor, **kwargs: Any) -> None:
        seen.append({module.config._attn_implementation for module in _attentions(trainer.model)})
        backward(loss, **kwargs)
        seen.append({module.config._attn_implementation for module in _attentions(trainer.model)})

    trainer.accelerator.backward = look
    trainer.train()
    assert seen == [{"eager"}, {"eager"}]
    assert type(_attentions(trainer.model)[0].config) is type(trainer.model.config.get_text_config())


def _attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.language_model.layers]
