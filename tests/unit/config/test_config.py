"""A config is the sum of its includes, itself and its overrides, and every fault in it is named with its place."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from vlm_pg.config import RunConfig, dump_config, load_config
from vlm_pg.config_files import known_keys, nearest_keys
from vlm_pg.errors import ConfigError
from vlm_pg.models.settings import LoraSettings
from vlm_pg.training.setup import low_lora_rate

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


@pytest.mark.parametrize("value", ["true", "false"])
def test_tensorboard_is_named_among_the_trackers(minimal: Path, value: str) -> None:
    said = refusal(minimal, f"observe.tensorboard={value}")
    assert "observe.tensorboard (command line) is not a known setting. Write observe.trackers=[tensorboard] for" in said
    assert load_config(minimal).observe.trackers == ("tensorboard",)
    assert load_config(minimal, ["observe.trackers=[]"]).observe.trackers == ()
    assert load_config(minimal, ["observe.trackers=[wandb,mlflow]"]).observe.trackers == ("wandb", "mlflow")


@pytest.mark.parametrize(
    ("section", "near"),
    [
        ("trainning", "training"),
        ("trainer", "training"),
        ("algo", "algorithm"),
        ("rollouts", "rollout"),
        ("eval_", "eval"),
    ],
)
def test_an_unknown_section_is_named_with_the_nearest_valid_one(minimal: Path, section: str, near: str) -> None:
    said = f"{section} (command line) is not a known setting. Did you mean {near}?"
    assert said in refusal(minimal, f"{section}.x=1")


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
        (
            "observe.trackers=[wandbb]",
            "observe.trackers.0 is 'wandbb' (command line): input should be 'tensorboard', 'wandb', 'swanlab' or",
        ),
        ("observe.trackers=[wandb,wandb]", "observe.trackers: trackers names wandb twice. Name each tracker once."),
        ("observe.project=a b", "observe.project is 'a b' (command line): string should match pattern"),
        ("training=5", "training is 5 (command line): it is a section and must be a mapping of settings"),
        ("eval.controls=[x]", "or 'frame_repeated'. Also score"),
        ("eval.controls=[x]", "Correct it, or pass eval.controls=VALUE."),
        ("run.resume=", "run.resume is None (command line): input should be a valid string"),
        ("media.min_frames=40", "media: min_frames is 40 and max_frames is 16"),
        ("model.lora.dropout=0.1", "model.lora.dropout: dropout is 0.1; it must be 0"),
        ("model.lora.rnak=4", "Did you mean model.lora.rank?"),
        ("model.lora.rank=0", "Rows of A and columns of B"),
        ("model.train=[vision]", "'tower', 'merger' or 'language'"),
        ("model.train=[]", "train is []; it must name one part or more"),
        ("model.positions=vllm", "'qwen' or 'transformers'"),
        ("training.learning_rates={towr: 1.0e-6}", "'tower', 'merger' or 'language'"),
        ("training.learning_rates={language: 0}", "greater than 0"),
        ("algorithm.prune_rate=1", "is 1 (command line): input should be less than 1. CPPO: share P of the rollouts"),
        ("algorithm.prune_rate=-0.1", "input should be greater than or equal to 0. CPPO"),
        ("training={", "is not YAML"),
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
        (["rollout.num_generations=1"], "compares the rollouts of a group, so at least 2 are needed. Set rollout."),
        (["training.micro_batch_tokens=4096"], "may need 17152. Set training.micro_batch_tokens=17152 or more, or"),
        (["rollout.temperature=0"], "Training needs a temperature above 0. Set rollout.temperature=1.0"),
        (["eval.num_generations=4"], "greedy rollouts are all alike. Set eval.num_generations=1, or eval.temperature"),
        (["reward.accuracy_weight=0", "reward.format_weight=0"], "so every reward is 0. Set reward.accuracy"),
        (["eval.controls=[frames_shuffled]", "eval.control_sets=[]"], "on nothing. Name sets in eval.control_sets, or"),
        (["eval.control_sets=[a]", "data.eval.a=a.jsonl"], "nothing would run on them. Set eval.controls=[frames_sh"),
        (["eval.sets=[]", "data.eval.a=a.jsonl"], "nothing would be evaluated. Name sets of data.eval in it, or set"),
        (
            ["eval.protocols.b=video_mme/lmms", "data.eval.a=a.jsonl"],
            "eval.protocols names 'b', which is not an evaluation set. Sets in data.eval: a. Add data.eval.b=PATH or",
        ),
        (["eval.sets=[b]", "data.eval.a=a.jsonl"], "eval.sets names 'b', which is not an evaluation set. Sets in"),
        (
            ["eval.headline_set=a", "data.eval.b=b.jsonl"],
            "names 'a', which is not an evaluation set. Sets in data.eval: b.",
        ),
        (
            ["eval.control_sets=[a]", "eval.controls=[frame_repeated]"],
            "Sets in data.eval: none. Add data.eval.a=PATH or",
        ),
        (["rollout.divide_prefix=always"], "always, which is for training.sequence_parallel above 1 with"),
        (
            ["rollout.divide_prefix=always", "training.sequence_parallel=2", "rollout.split=questions"],
            "but rollout.split is questions and rollout.gather is auto. Set rollout.split=auto and rollout.gather=all",
        ),
        (["cache.features=true"], "cache.folder is not set, so that there is nowhere to keep them. Set cache."),
        (
            ["cache.features=true", "cache.folder=c", "model.train=[merger,language]"],
            "cache.features is true and model.train is [merger, language], so that visual features change with every",
        ),
        (
            ["cache.features=true", "cache.folder=c", "model.share_prefix=false"],
            "cache.features is true and model.share_prefix is false, where everything is computed anew for comparison.",
        ),
        (
            ["rollout.divide_prefix=always", "training.sequence_parallel=4", "rollout.num_generations=3"],
            "but there are only 3 rollouts of a question to share. Set rollout.num_generations=4 or more",
        ),
        (
            ["training.learning_rates.tower=2.0e-7"],
            "training.learning_rates.tower is 2e-07, but model.train is [language], so that part is frozen and has no "
            "rate. Add tower to model.train, or leave its rate out.",
        ),
        (["model.train=[merger]", "training.learning_rates={language: 1.0e-6}"], "so that part is frozen"),
        (
            ["model.lora={}", "model.train=[tower, merger, language]"],
            "Set model.train=[language], or leave model.lora out",
        ),
        (["rollout.engine=server"], "rollout.server.url is not set"),
    ],
)
def test_impossible_combinations(minimal: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(minimal, *overrides)


@pytest.mark.parametrize("override", ["steps", "=5", "a..b=1", ".a=1"])
def test_an_override_that_is_no_assignment(minimal: Path, override: str) -> None:
    said = f"The override {override!r} cannot be read. Overrides are key=value with a dotted key. Write for example"
    assert said in refusal(minimal, override)


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


def test_a_key_inside_of_a_plain_value_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL + "data: {train: a.jsonl, media_root: null}\n")
    message = refusal(path, "data.train.c=c.jsonl")
    assert f"names a key inside of data.train, which is a.jsonl ({path})" in message
    assert "'data.train={c: c.jsonl}' to have that in its place, or 'data.train={NAME: a.jsonl, c: c.jsonl}'" in message
    for both in ("data.train={NAME: a.jsonl, c: c.jsonl}", "data.train={c: c.jsonl}"):
        assert "c" in load_config(path, [both]).data.train_sets
    assert "(command line)" in refusal(path, "data.train=b.jsonl", "data.train.c=c.jsonl")
    trackers = refusal(path, "observe.trackers=[wandb]", "observe.trackers.0=mlflow")
    assert "which is a list of 1 (command line)" in trackers and "Write 'observe.trackers=[\"mlflow\"]'," in trackers
    assert "inside of training, which is 5 (command line)" in refusal(path, "training=5", "training.steps=1")


def test_a_part_of_a_list_is_refused_with_the_list_to_write(tmp_path: Path) -> None:
    functions = '[{function: "r.py:it\'s", weight: 1}, {function: "r.py:two", weight: 0.5}]'
    path = write(tmp_path / "run.yaml", MINIMAL + f"data: {{train: a.jsonl}}\nreward: {{functions: {functions}}}\n")
    message = refusal(path, "reward.functions.1.weight=2")
    assert f"names a part of reward.functions, which is a list of 2 ({path}). A list is set as a whole" in message
    (typed,) = shlex.split(message.partition("Write ")[2].partition(", or change it in the file")[0])
    assert [one.weight for one in load_config(path, [typed]).reward.functions] == [1, 2]
    for part in ("2.weight", "x", "0.function.a", "1.weight.0", "0.x.y"):
        assert "Write reward.functions=[...] with all entries, or" in refusal(path, f"reward.functions.{part}=2")


def test_a_key_inside_of_what_is_empty_or_null_is_set(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL + "data: {train: null, media_root: null}\neval:\n")
    config = load_config(path, ["data.train.c=c.jsonl", "data.media_root.c=/c", "eval.temperature=1", "data.eval.x=x"])
    assert list(config.data.train_sets) == ["c"] and config.eval.temperature == 1
    assert load_config(path, ["data.train.c=c", "data.train.d=d"]).data.train_sets.keys() == {"c", "d"}
    # A file that includes another lays its mappings over what is there, as the guide says.
    above = write(tmp_path / "above.yaml", "include: [plain.yaml]\ndata: {train: {c: c.jsonl}}\n")
    write(tmp_path / "plain.yaml", MINIMAL + "data: {train: a.jsonl}\n")
    assert list(load_config(above).data.train_sets) == ["c"]


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
    good = "rollout.server.url=https://[::1]:8000/v1"
    assert load_config(minimal, ["rollout.engine=server", good]).rollout.server.url == good.partition("=")[2]
    message = refusal(minimal, f"rollout.server.url={url}")
    assert "rollout.server.url: the URL must be http:// or https://" in message and "secret" not in message


def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(minimal: Path) -> None:
    message = refusal(minimal, "rollout.server.api_key_variable=sk-secret")
    assert "the name of an environment variable" in message and "secret" not in message


SERVER = ["rollout.engine=server", "rollout.server.url=http://127.0.0.1:8000/v1"]


@pytest.mark.parametrize(
    ("overrides", "said", "way_out"),
    [
        (
            ["algorithm.baseline=none"],
            "algorithm.baseline is none and algorithm.scale_advantages is std",
            ["algorithm.scale_advantages=whiten"],
        ),
        (
            ["algorithm.baseline=none", "algorithm.scale_advantages=batch"],
            "algorithm.baseline is none and algorithm.scale_advantages is batch",
            ["algorithm.scale_advantages=none"],
        ),
        (
            ["algorithm.importance_cap=2", "rollout.logprobs=reuse"],
            "algorithm.importance_cap is 2.0 and rollout.logprobs is reuse",
            ["rollout.logprobs=recompute"],
        ),
        (
            ["algorithm.importance_cap=2", "rollout.logprobs=recompute", *SERVER],
            "algorithm.importance_cap is set and rollout.engine is server, whose rollouts the trainer scores itself",
            ["algorithm.importance_cap=null"],
        ),
        (
            ["algorithm.temporal_bonus=0.3", *SERVER],
            "algorithm.temporal_bonus is set and rollout.engine is server",
            ["algorithm.temporal_bonus=0"],
        ),
        (
            ["algorithm.loss=cispo", "algorithm.ratio_level=sequence"],
            "algorithm.loss is cispo and algorithm.ratio_level is sequence",
            ["algorithm.ratio_level=token"],
        ),
        (
            ["algorithm.loss=cispo", "algorithm.dual_clip=3"],
            "algorithm.dual_clip bounds the clipped loss, and algorithm.loss is cispo.",
            ["algorithm.dual_clip=null"],
        ),
        (
            ["algorithm.loss_arguments={beta: 1}"],
            "algorithm.loss_arguments has beta, and the loss clip takes none: it reads settings. Remove them, or name",
            ["algorithm.loss=own.py:loss"],
        ),
        (
            ["algorithm.advantage_arguments={power: 1}"],
            "algorithm.advantage_arguments has power, and baseline_and_scale takes none: it reads settings. Remove",
            ["algorithm.advantages=own.py:estimator"],
        ),
        (
            ["algorithm.advantages=own.py:estimator", "algorithm.preset=dr_grpo"],
            "algorithm.advantages is own.py:estimator, in place of which nothing else makes advantages, and "
            "algorithm.preset is dr_grpo, algorithm.scale_advantages is none. Leave that out, or",
            ["algorithm.preset=null"],
        ),
        (
            ["algorithm.length_bonus_tokens=[512, 320]"],
            "algorithm.length_bonus_tokens is [512, 320]: the shortest is longer than the longest.",
            ["algorithm.length_bonus_tokens=[320, 512]"],
        ),
        (
            ["algorithm.length_bonus=0.2", "rollout.max_new_tokens=319"],
            "algorithm.length_bonus goes to responses of 320 tokens and more, and rollout.max_new_tokens is 319",
            ["algorithm.length_bonus_tokens=[100, 200]"],
        ),
        (
            ["algorithm.preset=t_grpo", "algorithm.temporal_bonus=0"],
            "algorithm.preset is t_grpo and algorithm.temporal_bonus is 0, which leaves GRPO.",
            ["algorithm.temporal_bonus=0.3"],
        ),
        (
            ["algorithm.prune_rate=0.5", "algorithm.prune_correction=true", "algorithm.prune_metric=largest"],
            "algorithm.prune_correction is true and algorithm.prune_metric is largest",
            ["algorithm.prune_metric=random"],
        ),
        (
            ["algorithm.prune_rate=0.5", "algorithm.scale_advantages=batch"],
            "with prune_fill, which asks further questions until the freed tokens are used, and baseline=group_mean, "
            "scale_advantages=batch, whose statistics are over all of the step's questions.",
            ["algorithm.prune_fill=false"],
        ),
        (
            ["algorithm.prune_rate=0.5", "algorithm.baseline=none", "algorithm.scale_advantages=none"],
            "and baseline=none, scale_advantages=none, whose statistics are over",
            ["algorithm.baseline=leave_one_out"],
        ),
        (
            ["training.prompts_per_step=4", "algorithm.minibatches=5"],
            "algorithm.minibatches is 5, more than training.prompts_per_step=4.",
            ["algorithm.minibatches=4"],
        ),
        (
            ["rollout.num_generations=4", "algorithm.prune_rate=0.9"],
            "algorithm.prune_rate with rollout.num_generations: A pruning rate of 0.9 keeps none of 4 rollouts; at "
            "least one must train. 4 rollouts allow a rate of at most 0.75, a rate of 0.9 needs at least 10 rollouts.",
            ["rollout.num_generations=10"],
        ),
        (
            ["rollout.num_generations=4", "algorithm.prune_rate=0.9"],
            "4 rollouts allow a rate of at most 0.75",
            ["algorithm.prune_rate=0.75"],
        ),
    ],
)
def test_impossible_algorithms(minimal: Path, overrides: list[str], said: str, way_out: list[str]) -> None:
    """Each is refused with what is wrong, and the way out that its message names can be loaded."""
    assert said in refusal(minimal, *overrides)
    load_config(minimal, [*overrides, *way_out])


@pytest.mark.parametrize(("key", "known"), [("loss", "clip, cispo"), ("advantages", "baseline_and_scale")])
def test_a_name_that_is_neither_known_nor_a_path(minimal: Path, key: str, known: str) -> None:
    message = refusal(minimal, f"algorithm.{key}=ppo")
    assert f"algorithm.{key}: 'ppo' is no " in message
    assert f"Allowed are {known}, or a function of your own. Name one of them, or path/to/file.py:function" in message


def test_an_estimator_of_ones_own_may_do_with_one_rollout(minimal: Path) -> None:
    load_config(minimal, ["rollout.num_generations=1", "algorithm.advantages=own.py:estimator"])


def test_all_impossible_combinations_are_named_at_once(minimal: Path) -> None:
    message = refusal(minimal, "algorithm.baseline=none", "algorithm.minibatches=999", "training.engine=deepspeed")
    assert "algorithm.scale_advantages is std" in message
    assert "algorithm.minibatches is 999" in message
    assert "training.deepspeed_config is not set" in message


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_one_rollout_a_question_needs_an_algorithm_without_groups(minimal: Path, baseline: str) -> None:
    alone = ["rollout.num_generations=1"]
    said = f"rollout.num_generations is 1, and algorithm.baseline={baseline} compares the rollouts of a group"
    assert said in refusal(minimal, *alone, f"algorithm.baseline={baseline}")
    without_groups = ["algorithm.baseline=none", "algorithm.scale_advantages=whiten"]
    for allowed in (["algorithm.preset=reinforce_pp"], without_groups):
        config = load_config(minimal, alone + allowed)
        assert (config.rollout.num_generations, config.algorithm.baseline) == (1, "none")


def test_parts_and_rates_from_the_command_line(tmp_path: Path, minimal: Path) -> None:
    assert load_config(minimal).model.train == ("language",) and load_config(minimal).training.learning_rates == {}
    config = load_config(minimal, ["model.train=[merger, tower]", "training.learning_rates={tower: 2.0e-7}"])
    assert config.model.train == ("tower", "merger") and config.training.learning_rates == {"tower": 2e-7}
    more = load_config(minimal, ["model.train=[merger, tower]", "training.learning_rates.merger=1.0e-5"])
    assert more.training.learning_rates == {"merger": 1e-5}
    assert load_config(write(tmp_path / "dumped.yaml", dump_config(config))) == config


def test_an_adapter_is_off_by_default_and_set_from_the_command_line(tmp_path: Path, minimal: Path) -> None:
    assert load_config(minimal).model.lora is None
    assert load_config(minimal, ["model.lora={}"]).model.lora == LoraSettings()
    config = load_config(minimal, ["model.lora.rank=4", "model.lora.target_modules=[q_proj]"])
    assert config.model.lora == LoraSettings(rank=4, target_modules=("q_proj",))
    assert load_config(write(tmp_path / "dumped.yaml", dump_config(config))) == config


def test_the_learning_rate_of_an_adapter(minimal: Path) -> None:
    """By default ten times that of full fine-tuning; what is set stays, with a warning where it is as low."""
    assert load_config(minimal).training.learning_rate == 1e-6
    config = load_config(minimal, ["model.lora={}"])
    assert config.training.learning_rate == 1e-5 and low_lora_rate(config) is None
    assert load_config(minimal, ["model.lora={}", "training.learning_rate=3e-5"]).training.learning_rate == 3e-5
    low = load_config(minimal, ["model.lora={}", "training.learning_rate=1e-6"])
    assert "its peak learning rate is 1e-06, a rate of full fine-tuning" in str(low_lora_rate(low))
    assert low_lora_rate(load_config(minimal, ["training.learning_rate=1e-6"])) is None
    by_part = load_config(minimal, ["model.lora={}", "training.learning_rates.language=1e-6"])
    assert "1e-06" in str(low_lora_rate(by_part))
