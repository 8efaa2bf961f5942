"""A config is the sum of its includes, itself and its overrides, and every fault in it is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vlm_pg.config import RunConfig, dump_config, load_config
from vlm_pg.config_errors import known_keys, nearest_keys
from vlm_pg.errors import ConfigError

REPO_ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path.relative_to(REPO_ROOT) for path in (REPO_ROOT / "configs").glob("*.yaml") if path.stem != "base")
MINIMAL = "model: {path: some/model}\ntraining: {steps: 3}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path / "minimal.yaml", MINIMAL)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_shipped_config_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO_ROOT)
    config = load_config(path)
    assert config.data.train is not None
    assert config.training.deepspeed_config is None or Path(config.training.deepspeed_config).is_file()


def test_the_two_promised_configs_are_shipped() -> None:
    assert {path.name for path in SHIPPED} >= {"embedded.yaml", "qwen2_5_vl_7b_video_r1.yaml"}


@pytest.mark.parametrize("path", sorted((REPO_ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_model_file_serves_as_an_include(path: Path, tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "run.yaml", f"include: ['{path}']\ntraining: {{steps: 1}}\n"))
    assert config.model.path


def test_video_r1_has_its_published_settings() -> None:
    config = load_config(REPO_ROOT / "configs/qwen2_5_vl_7b_video_r1.yaml")
    assert (config.media.fps, config.media.max_frames, config.media.max_pixels) == (2.0, 16, 128 * 28 * 28)
    assert (config.rollout.num_generations, config.algorithm.kl_coef) == (8, 0.04)
    assert (config.training.learning_rate, config.training.engine) == (1e-6, "deepspeed")
    assert (config.model.dtype, config.model.gradient_checkpointing) == ("bf16", True)


def test_includes_merge_in_order_below_the_file_and_overrides_on_top(tmp_path: Path) -> None:
    write(tmp_path / "shared/a.yaml", "model: {path: a}\nrollout: {num_generations: 4, top_p: 0.5, top_k: 7}\n")
    write(tmp_path / "shared/b.yaml", "include: [a.yaml]\nrollout: {top_p: 0.6}\n")
    path = write(
        tmp_path / "run.yaml",
        "include: [shared/b.yaml]\nrollout: {top_k: 8}\ntraining: {steps: 3, betas: [0.5, 0.6]}\n",
    )
    config = load_config(path, ["rollout.top_k=9", "training.learning_rate=1e-5", "data.eval.seen=x.jsonl"])
    assert config.model.path == "a"
    assert (config.rollout.num_generations, config.rollout.top_p, config.rollout.top_k) == (4, 0.6, 9)
    assert (config.training.steps, config.training.betas, config.training.learning_rate) == (3, (0.5, 0.6), 1e-5)
    assert {name: str(file) for name, file in config.data.eval.items()} == {"seen": "x.jsonl"}


def test_the_later_include_wins(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "rollout: {top_k: 1}")
    write(tmp_path / "b.yaml", "rollout: {top_k: 2}")
    assert load_config(write(tmp_path / "run.yaml", "include: [a.yaml, b.yaml]\n" + MINIMAL)).rollout.top_k == 2


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "rollout: {top_k: 7}\n" + MINIMAL)
    config = load_config(write(tmp_path / "run.yaml", "include: [base.yaml]\nrollout:\neval:\n"))
    assert config.rollout.top_k == 7


def test_what_is_dumped_loads_back_equal(tmp_path: Path, minimal: Path) -> None:
    config = load_config(
        minimal,
        ["run.name=x1", "training.learning_rate=3.3e-7", "data.eval.seen=a.jsonl", "eval.controls=[frames_shuffled]"]
        + ["eval.control_sets=[seen]", 'prompt.system="Zeile 1\\nüber: #2"'],
    )  # fmt: skip
    text = dump_config(config)
    assert load_config(write(tmp_path / "dumped.yaml", text)) == config
    assert set(yaml.safe_load(text)) == set(RunConfig.model_fields)


def test_the_folder_follows_the_name_unless_it_is_given(minimal: Path) -> None:
    assert load_config(minimal, ["run.name=mine"]).run.dir == "runs/mine"
    assert load_config(minimal, ["run.name=mine", "run.dir=elsewhere"]).run.dir == "elsewhere"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("training.stepz", "training.steps"),
        ("steps", "training.steps"),
        ("rollout.num_generation", "rollout.num_generations"),
        ("temperature", "rollout.temperature or eval.temperature"),
        ("algorithm.temperature", "rollout.temperature or eval.temperature"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(minimal: Path, key: str, near: str) -> None:
    said = f"{key} (command line) is not a known setting. Did you mean {near}? Known here: "
    assert said in refusal(minimal, f"{key}=1")
    assert nearest_keys(key, RunConfig) == near.split(" or ")


def test_an_unknown_section_is_named_with_the_nearest_valid_one(minimal: Path) -> None:
    assert "trainning (command line) is not a known setting. Did you mean training?" in refusal(
        minimal, "trainning.x=1"
    )


def test_an_unknown_key_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "rollout: {topk: 5}\n")
    message = refusal(write(tmp_path / "run.yaml", "include: [base.yaml]\n" + MINIMAL))
    assert f"rollout.topk ({tmp_path / 'base.yaml'}) is not a known setting. Did you mean rollout.top_k?" in message


def test_a_key_like_none_that_is_known_says_so(minimal: Path) -> None:
    assert "qqqq (command line) is not a known setting. Remove it. Known here: run, model," in refusal(
        minimal, "qqqq=1"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.steps=0",
            "training.steps is 0 (command line): input should be greater than or equal to 1. Optimizer",
        ),
        ("training.steps=five", "training.steps is 'five' (command line): input should be a valid integer"),
        ("model.dtype=fp8", "model.dtype is 'fp8' (command line): input should be 'fp32' or 'bf16'."),
        ("training=5", "training is 5 (command line): it is a section and must be a mapping of settings"),
        ("eval.controls=[x]", "or 'frame_repeated'. Also score"),
        ("eval.controls=[x]", "Correct it, or pass eval.controls=VALUE."),
        ("run.resume=", "run.resume is None (command line): input should be a valid string"),
        ("media.min_frames=40", "media: min_frames is 40 and max_frames is 16"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(minimal: Path, override: str, said: str) -> None:
    assert said in refusal(minimal, override)


def test_missing_values_are_all_named_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "empty.yaml", ""))
    assert "model.path is missing. Local folder or hub name" in message
    assert f"training.steps is missing. Optimizer steps. Add it to {tmp_path / 'empty.yaml'}, or pass" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["training.engine=deepspeed"],
            "training.deepspeed_config is not set. DeepSpeed needs a JSON file. Set training.",
        ),
        (["training.deepspeed_config=x.json"], "which only engine deepspeed reads. Set training.engine=deepspeed or"),
        (
            ["rollout.num_generations=1"],
            "GRPO compares the rollouts of a group, so at least 2 are needed. Set rollout.",
        ),
        (["training.micro_batch_tokens=4096"], "may need 17152. Set training.micro_batch_tokens=17152 or more, or"),
        (["rollout.temperature=0"], "Training needs a temperature above 0. Set rollout.temperature=1.0"),
        (["eval.num_generations=4"], "greedy rollouts are all alike. Set eval.num_generations=1, or eval.temperature"),
        (["reward.accuracy_weight=0", "reward.format_weight=0"], "At least one must be positive. Set reward.accuracy"),
        (["eval.controls=[frames_shuffled]"], "Controls need sets to run on, and the other way round. Set both"),
        (
            ["eval.headline_set=a", "data.eval.b=b.jsonl"],
            "names 'a', which is not an evaluation set. Sets in data.eval: b.",
        ),
        (
            ["eval.control_sets=[a]", "eval.controls=[frame_repeated]"],
            "Sets in data.eval: none. Add data.eval.a=PATH or",
        ),
    ],
)
def test_impossible_combinations(minimal: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(minimal, *overrides)


@pytest.mark.parametrize("override", ["steps", "=5", "a..b=1", ".a=1"])
def test_an_override_that_is_no_assignment(minimal: Path, override: str) -> None:
    said = f"The override {override!r} cannot be read. Overrides are key=value with a dotted key. Write for example"
    assert said in refusal(minimal, override)


def test_an_override_that_is_no_yaml(minimal: Path) -> None:
    assert "is not YAML" in refusal(minimal, "training={")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "holds list, not sections. It must be a YAML mapping of sections"),
        ("training: {steps: 1\n", "is not valid YAML"),
        ("training: {steps: 1, steps: 2}\n", "the key 'steps' is given twice"),
        ("!!python/object/apply:os.getcwd []\n", "is not valid YAML: could not determine a constructor"),
        ("include: base.yaml\n", "It must be a list of paths relative to that file. Write include: [base.yaml]."),
        ("include: [absent.yaml]\n", "absent.yaml cannot be read"),
        ("include: [run.yaml]\n", "Includes must not form a circle. Remove one of these includes."),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(write(tmp_path / "run.yaml", text))


def test_a_missing_file(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent.yaml")


def test_every_setting_is_described_and_every_section_refuses_unknown_keys() -> None:
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        assert section is not None
        assert section.model_config["extra"] == "forbid", name
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key} has no description"
    assert "training.steps" in known_keys(RunConfig)


def test_a_mapping_on_the_command_line_replaces_a_settings_mapping(tmp_path: Path) -> None:
    text = "model: {path: m}\ntraining: {steps: 1}\ndata: {eval: {a: a.jsonl, b: b.jsonl}}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml", ["data.eval={}"]).data.eval == {}
    assert list(load_config(tmp_path / "run.yaml", ["data.eval={c: c.jsonl}"]).data.eval) == ["c"]
    assert len(load_config(tmp_path / "run.yaml", ["data.eval.c=c.jsonl"]).data.eval) == 3
    assert load_config(tmp_path / "run.yaml", ["training={warmup_steps: 3}"]).training.steps == 1


def test_a_server_needs_an_address(minimal: Path) -> None:
    assert "rollout.server.url is not set" in refusal(minimal, "rollout.engine=server")
    url = "rollout.server.url=https://[::1]:8000/v1"
    assert load_config(minimal, ["rollout.engine=server", url]).rollout.server.url == "https://[::1]:8000/v1"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://host:99999/v1",
        "http://[::1/v1",
        "'http://a host/v1'",
        "http://me:secret@host/v1",
        "http://host/v1?key=secret",
        "'http://host/v1#secret'",
    ],
)
def test_an_address_that_is_none_is_refused_without_what_it_may_hide(minimal: Path, url: str) -> None:
    message = refusal(minimal, f"rollout.server.url={url}")
    assert "rollout.server.url: the URL must be http:// or https://" in message and "secret" not in message


def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(minimal: Path) -> None:
    message = refusal(minimal, "rollout.server.api_key_variable=sk-secret")
    assert "the name of an environment variable" in message and "secret" not in message
