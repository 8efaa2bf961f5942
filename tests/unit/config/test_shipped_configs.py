"""Every config that comes with the project can be run, and has the settings it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vlm_pg.algorithms.registry import PRESETS, PresetName
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.config import RunConfig, load_config
from vlm_pg.prompts.settings import DEFAULT_INSTRUCTIONS

REPO_ROOT = Path(__file__).parents[3]
CONFIGS = REPO_ROOT / "configs"
RUNS = sorted([path for path in CONFIGS.glob("*.yaml") if path.stem != "base"] + [*CONFIGS.glob("algorithms/*.yaml")])


SUITES = sorted(CONFIGS.glob("eval/*.yaml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def shipped(name: str) -> RunConfig:
    return load_config(CONFIGS / name)


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_every_shipped_config_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)
    config = load_config(path)
    assert config.data.train is not None and config.model.positions == "qwen", "the rule of the weights"
    assert config.training.deepspeed_config is None or Path(config.training.deepspeed_config).is_file()


@pytest.mark.parametrize("path", SUITES, ids=name_of)
def test_every_set_of_a_shipped_suite_has_a_protocol_of_its_own_pipeline(path: Path) -> None:
    config = load_config(path)
    assert set(config.eval.protocols) == set(config.data.eval)
    for name, records in config.data.eval.items():
        protocol = config.eval.protocol_of(name)
        assert protocol is not None
        assert str(records) == f"data/{protocol.pipeline}:eval"


def test_suites_are_what_is_reported() -> None:
    video_r1 = {"vsi_bench", "video_mmmu", "mmvu", "mvbench", "tempcompass", "video_mme"}
    for variant in ("video_r1", "video_r1_32", "video_r1_64"):
        assert shipped(f"eval/{variant}.yaml").eval.protocols == {name: f"{name}/{variant}" for name in video_r1}
    assert shipped("eval/qwen2_5_vl.yaml").eval.protocols["mvbench"] == "mvbench/qwen2_5_vl"
    assert shipped("eval/qwen3_vl.yaml").eval.protocols["video_mme"] == "video_mme/qwen3_vl"


def test_no_two_runs_share_a_folder() -> None:
    paths = [*RUNS, *SUITES]
    assert len({load_config(path).run.dir for path in paths}) == len(paths)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("models/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_model_file_serves_as_an_include(path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"include: ['{path}']\ntraining: {{steps: 1}}\n")
    assert load_config(run).model.path


def test_what_runs_share_leaves_the_algorithm_to_the_preset() -> None:
    assert "algorithm" not in yaml.safe_load((CONFIGS / "base.yaml").read_text())
    assert "algorithm" not in yaml.safe_load((CONFIGS / "embedded_task.yaml").read_text())


def test_the_embedded_default() -> None:
    config = shipped("embedded.yaml")
    assert config.algorithm == AlgorithmSettings(kl_coef=0.1)
    assert (config.training.steps, config.training.learning_rate, config.training.prompts_per_step) == (700, 5e-4, 16)
    assert (config.rollout.num_generations, config.rollout.max_new_tokens) == (8, 32)
    assert (config.reward.accuracy_weight, config.reward.format_weight) == (1.0, 0.1)
    assert (config.eval.controls, config.eval.control_sets) == (("frames_shuffled", "frame_repeated"), ("seen_orders",))


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_runs_on_the_embedded_task(name: PresetName) -> None:
    """The same task, the same number of optimizer updates; a KL large enough for the tiny model."""
    assert {path.stem for path in CONFIGS.glob("algorithms/*.yaml")} == set(PRESETS)
    config, embedded = shipped(f"algorithms/{name}.yaml"), shipped("embedded.yaml")
    assert (config.run.name, config.algorithm.preset) == (f"embedded_{name}", name)
    for section in ("model", "data", "media", "prompt", "rollout", "reward"):
        assert getattr(config, section) == getattr(embedded, section)
    assert config.training == embedded.training.model_copy(update={"steps": config.training.steps})
    assert config.training.steps * config.algorithm.updates == embedded.training.steps
    assert config.algorithm.kl_coef >= 0.05
    changed = {"kl_coef", "clip_low", "clip_high", "length_bonus", "minibatches"}
    assert set(config.algorithm.differences_from_preset) <= changed


def test_video_r1_has_its_published_settings() -> None:
    config = shipped("qwen2_5_vl_7b_video_r1.yaml")
    assert (config.media.fps, config.media.max_frames, config.media.max_pixels) == (2.0, 16, 128 * 28 * 28)
    assert (config.rollout.num_generations, config.reward.format_weight) == (8, 1.0)
    assert (config.training.learning_rate, config.training.engine) == (1e-6, "deepspeed")
    assert (config.model.dtype, config.model.gradient_checkpointing) == ("bf16", True)
    assert config.algorithm == AlgorithmSettings(preset="t_grpo")
    algorithm = config.algorithm
    assert (algorithm.kl_coef, algorithm.temporal_bonus, algorithm.length_bonus) == (0.04, 0.3, 0.2)
    assert config.algorithm.length_bonus_tokens[1] <= config.rollout.max_new_tokens


def test_video_r1_with_vllm_differs_in_sampling_alone() -> None:
    config, plain = shipped("qwen2_5_vl_7b_video_r1_vllm.yaml"), shipped("qwen2_5_vl_7b_video_r1.yaml")
    for section in ("model", "data", "media", "prompt", "reward", "training", "eval"):
        assert getattr(config, section) == getattr(plain, section)
    corrected = {"importance_cap": 3.0, "importance_level": "sequence", "importance_mode": "mask"}
    assert config.algorithm == plain.algorithm.model_copy(update=corrected)
    assert (config.rollout.engine, len(config.rollout.server.urls)) == ("server", 4)
    same = {"engine": "in_process", "logprobs": "reuse", "server": plain.rollout.server}
    assert config.rollout.model_copy(update=same) == plain.rollout
    ahead = shipped("qwen2_5_vl_7b_video_r1_async.yaml")
    assert ahead.rollout.staleness == 1 and ahead.rollout.server.launch is not None
    assert ahead.rollout.server.launch.engine == "vlm_pg" and ahead.algorithm == config.algorithm
    assert ahead.rollout.model_copy(update={"staleness": 0, "server": config.rollout.server}) == config.rollout


@pytest.mark.parametrize(
    "name, model",
    [("text_gsm8k_cppo.yaml", "Qwen/Qwen2.5-1.5B-Instruct"), ("text_math_cppo.yaml", "Qwen/Qwen2.5-7B-Instruct")],
)
def test_cppo_on_text_has_its_published_settings(name: str, model: str) -> None:
    config = shipped(name)
    assert config.algorithm == AlgorithmSettings(preset="cppo")
    assert (config.algorithm.kl_coef, config.algorithm.num_iterations, config.algorithm.prune_rate) == (0.04, 2, 0.5)
    assert (config.rollout.num_generations, config.rollout.max_new_tokens) == (16, 1024)
    assert (config.training.learning_rate, config.reward.accuracy_weight, config.reward.format_weight) == (1e-6, 1, 1)
    assert config.prompt.instructions == DEFAULT_INSTRUCTIONS
    assert (config.model.path, config.model.dtype) == (model, "bf16")
    for rate in (0.5, 0.75, 0.875, 0.9375):
        load_config(CONFIGS / name, [f"algorithm.prune_rate={rate}"])
