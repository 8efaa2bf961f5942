"""A config is the sum of its includes, itself and its overrides, and every fault in it is named with its place."""

from __future__ import annotations

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
    write(
        tmp_path / "shared/a.yaml",
        "model: {path: a, lora: {rank: 4}}\nrollout: {num_generations: 4, top_p: 0.5, top_k: 7}\n",
    )
    write(tmp_path / "shared/b.yaml", "include: [a.yaml]\nrollout: {top_p: 0.6}\n")
    write(tmp_path / "c.yaml", "rollout: {repetition_penalty: 1.0, top_k: 6}\nmedia: {fps: 3}\n")
    path = write(
        tmp_path / "run.yaml",
        "include: [c.yaml, shared/b.yaml]\nrollout: {top_p: 0.6}\ntraining: {steps: 3, betas: [0.5, 0.6]}\nmedia:\n"
        "model: {lora: null}\n",
    )
    config = load_config(path, ["training.learning_rate=1e-5", "data.eval.seen=x.jsonl"])
    assert config.model.path == "a" and config.media.fps == 3, "an empty section changes nothing"
    assert config.model.lora is None, "null below a section is a value"
    assert (config.rollout.num_generations, config.rollout.top_p, config.rollout.top_k) == (4, 0.6, 7)
    assert (config.training.steps, config.training.betas, config.training.learning_rate) == (3, (0.5, 0.6), 1e-5)
    assert {name: str(file) for name, file in config.data.eval.items()} == {"seen": "x.jsonl"}
    assert load_config(path, ["rollout.top_k=9"]).rollout.top_k == 9


def test_what_is_dumped_loads_back_equal(tmp_path: Path, minimal: Path) -> None:
    overrides = ["run.name=x1", "training.learning_rates={tower: 2.0e-7}", "data.eval.seen=a.jsonl"]
    overrides += ["eval.controls=[frames_shuffled]", "eval.control_sets=[seen]", 'prompt.system="Zeile 1\\nüber: #2"']
    for more in (["model.train=[merger, tower]"], ["model.lora.rank=4", "training.learning_rates={}"]):
        config = load_config(minimal, [*overrides, *more])
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
        ("trainning", "training"),
        ("trainer", "training"),
        ("algo", "algorithm"),
        ("eval_", "eval"),
    ],
)
def test_an_unknown_key_or_section_is_named_with_the_nearest_valid_one(minimal: Path, key: str, near: str) -> None:
    message = f"{key} (command line) is not a known setting. Did you mean {near}? Known here: "
    assert message in refusal(minimal, f"{key}=1")
    assert nearest_keys(key, RunConfig) == near.split(" or ")


def test_tensorboard_is_named_among_the_trackers(minimal: Path) -> None:
    message = refusal(minimal, "observe.tensorboard=true")
    assert (
        "observe.tensorboard (command line) is not a known setting. Write observe.trackers=[tensorboard] for" in message
    )
    assert load_config(minimal).observe.trackers == ("tensorboard",)
    assert load_config(minimal, ["observe.trackers=[wandb,mlflow]"]).observe.trackers == ("wandb", "mlflow")


def test_an_unknown_key_is_named_with_its_file_or_with_all_known_ones(tmp_path: Path, minimal: Path) -> None:
    write(tmp_path / "base.yaml", "rollout: {topk: 5}\n")
    message = refusal(write(tmp_path / "run.yaml", "include: [base.yaml]\n" + MINIMAL))
    assert f"rollout.topk ({tmp_path / 'base.yaml'}) is not a known setting. Did you mean rollout.top_k?" in message
    message = refusal(minimal, "qqqq=1")
    assert "qqqq (command line) is not a known setting. Remove it. Known here: run, model," in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "training.steps=0",
            "training.steps is 0 (command line): input should be greater than or equal to 1. Optimizer",
        ),
        ("training.steps=five", "training.steps is 'five' (command line): input should be a valid integer"),
        ("model.dtype=fp8", "model.dtype is 'fp8' (command line): input should be 'fp32' or 'bf16'."),
        (
            "observe.trackers=[wandbb]",
            "observe.trackers.0 is 'wandbb' (command line): input should be 'tensorboard', 'w",
        ),
        ("observe.trackers=[wandb,wandb]", "observe.trackers: trackers names wandb twice. Name each tracker once."),
        ("observe.project=a b", "observe.project is 'a b' (command line): string should match pattern"),
        ("training=5", "training is 5 (command line): it is a section and must be a mapping of settings"),
        ("eval.controls=[x]", "Correct it, or pass eval.controls=VALUE."),
        ("run.resume=", "run.resume is None (command line): input should be a valid string"),
        ("media.min_frames=40", "media: min_frames is 40 and max_frames is 16"),
        ("model.lora.dropout=0.1", "model.lora.dropout: dropout is 0.1; it must be 0"),
        ("model.lora.rnak=4", "Did you mean model.lora.rank?"),
        ("model.lora.rank=0", "rows of A and columns of B"),
        ("model.train=[vision]", "'tower', 'merger' or 'language'"),
        ("model.train=[]", "train is []; it must name one part or more"),
        ("training.learning_rates={towr: 1.0e-6}", "'tower', 'merger' or 'language'"),
        ("training.learning_rates={language: 0}", "greater than 0"),
        ("algorithm.prune_rate=1", "is 1 (command line): input should be less than 1. CPPO: share P of the rollouts"),
        ("algorithm.loss=ppo", "algorithm.loss: 'ppo' is no "),
        ("algorithm.loss=ppo", "Allowed are clip, cispo, or a function of your own. Name one of them, or path/to/fi"),
        ("algorithm.advantages=ppo", "Allowed are baseline_and_scale, or a function of your own. Name one of them"),
        ("training={", "is not YAML"),
        *(
            (word, f"The override {word!r} cannot be read. Overrides are key=value")
            for word in ("steps", "=5", "a..b=1")
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(minimal: Path, override: str, words: str) -> None:
    assert words in refusal(minimal, override)


def test_missing_values_are_all_named_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "empty.yaml", ""))
    assert "model.path is missing. Local folder or hub name" in message
    assert f"training.steps is missing. Optimizer steps. Add it to {tmp_path / 'empty.yaml'}, or pass" in message


SERVER = "rollout.engine=server rollout.server.url=http://127.0.0.1:8000/v1"
DIVIDED = "rollout.divide_prefix=always training.sequence_parallel"


@pytest.mark.parametrize(
    ("overrides", "words", "remedy"),
    [
        ("training.engine=deepspeed", "DeepSpeed needs a JSON file. Set", "training.deepspeed_config=x.json"),
        ("training.deepspeed_config=x.json", "which only engine deepspeed reads", "training.engine=deepspeed"),
        ("training.micro_batch_tokens=4096", "may need 17152", "training.micro_batch_tokens=17152"),
        ("rollout.temperature=0", "Training needs a temperature above 0.", "rollout.temperature=1.0"),
        ("eval.num_generations=4", "greedy rollouts are all alike.", "eval.temperature=1.0"),
        ("reward.accuracy_weight=0 reward.format_weight=0", "so every reward is 0.", "reward.accuracy_weight=1"),
        ("eval.controls=[frames_shuffled] eval.control_sets=[]", "on nothing.", "eval.control_sets=null"),
        ("eval.control_sets=[a] data.eval.a=a", "nothing would run on them.", "eval.controls=[frames_shuffled]"),
        ("eval.sets=[] data.eval.a=a", "nothing would be evaluated.", "eval.sets=null"),
        ("eval.every=2", "there is no evaluation set to run.", "eval.every=0"),
        (
            "training.keep_best=eval/accuracy eval.every=2 data.eval.a=a",
            "Set eval.every so that it divid",
            "eval.every=1",
        ),
        ("eval.protocols.b=video_mme/lmms data.eval.a=a", "names 'b', which is not an evaluation", "data.eval.b=b"),
        ("eval.headline_set=a data.eval.b=b", "Sets in data.eval: b. Add data.eval.a=PATH or", "data.eval.a=a"),
        ("eval.control_sets=[a] eval.controls=[frame_repeated]", "Sets in data.eval: none.", "data.eval.a=a"),
        ("rollout.split=prompts", "is prompts, which is for training.sequence_parallel", "rollout.split=auto"),
        (
            "rollout.divide_prefix=always",
            "always, which is for training.sequence_parallel",
            "rollout.divide_prefix=auto",
        ),
        (f"{DIVIDED}=2 rollout.split=questions", "split is questions and rollout.gather is auto", "rollout.split=auto"),
        (f"{DIVIDED}=4 rollout.num_generations=3", "are only 3 rollouts of a question", "rollout.num_generations=4"),
        ("cache.features=true", "cache.folder is not set, so that there is nowhere to keep them.", "cache.folder=c"),
        (
            "cache.features=true cache.folder=c model.train=[merger,language]",
            "model.train is [merger, language], so that visual features change with every",
            "cache.features=false",
        ),
        (
            "cache.features=true cache.folder=c model.share_prefix=false",
            "everything is computed",
            "model.share_prefix=true",
        ),
        ("training.learning_rates.tower=2.0e-7", "part is frozen and has no rate.", "model.train=[tower,language]"),
        ("model.lora={} model.train=[tower,merger,language]", "or leave model.lora out", "model.train=[language]"),
        ("rollout.engine=server", "rollout.server.url is not set", "rollout.server.url=http://127.0.0.1:8000/v1"),
        ("rollout.num_generations=1", "so at least 2 are needed.", "algorithm.preset=reinforce_pp"),
        ("rollout.num_generations=1", "so at least 2 are needed.", "algorithm.advantages=own.py:estimator"),
        (
            "rollout.num_generations=1 algorithm.baseline=leave_one_out",
            "at least 2 are needed.",
            "rollout.num_generations=2",
        ),
        (
            "training.objective=sft algorithm.preset=dapo rollout.num_generations=4",
            "samples no rollouts, and algorithm.preset=dapo, rollout.num_generations=4 is for rl.",
            "training.objective=rl",
        ),
        ("preference.beta=0.2", "is rl, and section preference is for dpo.", "training.objective=dpo"),
        (
            "training.objective=dpo training.micro_batch_tokens=17152",
            "with both responses of a pair (rollout.max_new_tokens each) may need 17920",
            "training.micro_batch_tokens=17920",
        ),
        ("training.objective=dpo model.share_prefix=false", "computed behind one prompt.", "model.share_prefix=true"),
        (
            "training.objective=dpo algorithm.loss_average=sequence_mean",
            "and algorithm.loss_average=sequence_mean is for rl.",
            "algorithm.loss_average=token_mean",
        ),
        ("training.objective=distill", "is distill and distillation.teacher is None.", "distillation.teacher=t"),
        (
            "training.objective=sft distillation.teacher=t",
            "may be given with rl, and reads no records' responses.",
            "training.objective=distill",
        ),
        ("distillation.top_k=3", "has settings and no teacher.", "distillation.teacher=t"),
        (
            "training.objective=distill distillation.teacher=t algorithm.kl_coef=0.1 rollout.logprobs=recompute",
            "trains on a teacher and no rewards, and algorithm.kl_coef=0.1, rollout.logprobs=recompute is for rl.",
            "training.objective=rl",
        ),
        (
            "training.objective=sft algorithm.loss_average=sequence_mean algorithm.kl_coef=0.1",
            "samples no rollouts, and algorithm.kl_coef=0.1 is for rl.",
            "algorithm.kl_coef=0",
        ),
        (
            "training.objective=sft training.keep_best=reward",
            "training.objective=sft has none.",
            "training.keep_best=null",
        ),
        ("algorithm.baseline=none", "algorithm.scale_advantages is std", "algorithm.scale_advantages=whiten"),
        ("algorithm.baseline=none algorithm.scale_advantages=batch", "is batch", "algorithm.scale_advantages=none"),
        ("algorithm.importance_cap=2 rollout.logprobs=reuse", "same ones.", "rollout.logprobs=recompute"),
        (f"algorithm.importance_cap=2 {SERVER}", "same ones.", "rollout.logprobs=recompute"),
        ("rollout.staleness=1", "only a server can sample while", "rollout.staleness=0"),
        (
            f"rollout.staleness=1 {SERVER} rollout.server.weights=keep",
            "only a server can",
            "rollout.server.weights=push",
        ),
        (f"rollout.staleness=1 {SERVER} rollout.server.sleep=true", "without sleep", "rollout.server.sleep=false"),
        (f"rollout.staleness=1 {SERVER} algorithm.resample_rounds=2", "takes further questions", "rollout.staleness=0"),
        (f"rollout.staleness=1 {SERVER} algorithm.preset=cppo", "prune_fill", "algorithm.prune_fill=false"),
        (f"rollout.staleness=1 {SERVER} rollout.logprobs=recompute", "is recompute", "algorithm.importance_cap=2"),
        (
            f"{SERVER} rollout.server.sleep=true rollout.server.weights=keep",
            "gives up its weights",
            "rollout.server.weights=push",
        ),
        (
            "algorithm.importance_level=sequence algorithm.importance_mode=mask rollout.logprobs=recompute",
            "algorithm.importance_cap is null, so that no importance weights are computed, and "
            "algorithm.importance_level is sequence, algorithm.importance_mode is mask.",
            "algorithm.importance_cap=2",
        ),
        (
            "algorithm.importance_floor=0.5 rollout.logprobs=recompute",
            "and algorithm.importance_floor is 0.5. Set",
            "algorithm.importance_cap=2",
        ),
        (
            "algorithm.importance_cap=0.5 algorithm.importance_floor=0.5 rollout.logprobs=recompute",
            "no ratio would be between them.",
            "algorithm.importance_floor=0.4",
        ),
        ("algorithm.loss=cispo algorithm.ratio_level=sequence", "is sequence", "algorithm.ratio_level=token"),
        ("algorithm.loss=cispo algorithm.dual_clip=3", "dual_clip bounds the clipped", "algorithm.dual_clip=null"),
        ("algorithm.loss_arguments.beta=1", "has beta, and the loss clip takes none", "algorithm.loss=own.py:loss"),
        (
            "algorithm.advantage_arguments.power=1",
            "algorithm.advantage_arguments has power, and baseline_and_scale takes none",
            "algorithm.advantages=own.py:estimator",
        ),
        (
            "algorithm.advantages=own.py:estimator algorithm.preset=dr_grpo",
            "algorithm.advantages is own.py:estimator, in place of which nothing else makes advantages, and "
            "algorithm.preset is dr_grpo, algorithm.scale_advantages is none. Leave that out, or",
            "algorithm.preset=null",
        ),
        (
            "algorithm.length_bonus_tokens=[512,320]",
            "the shortest is longer",
            "algorithm.length_bonus_tokens=[320,512]",
        ),
        (
            "algorithm.length_bonus=0.2 rollout.max_new_tokens=319",
            "algorithm.length_bonus goes to responses of 320 tokens and more, and rollout.max_new_tokens is 319",
            "algorithm.length_bonus_tokens=[100,200]",
        ),
        ("algorithm.preset=t_grpo algorithm.temporal_bonus=0", "which leaves GRPO.", "algorithm.temporal_bonus=0.3"),
        (
            "algorithm.prune_rate=0.5 algorithm.prune_correction=true algorithm.prune_metric=largest",
            "algorithm.prune_correction is true and algorithm.prune_metric is largest",
            "algorithm.prune_metric=random",
        ),
        (
            "algorithm.prune_rate=0.5 algorithm.scale_advantages=batch",
            "with prune_fill, which asks further questions until the freed tokens are used, and baseline=group_mean, "
            "scale_advantages=batch, whose statistics are over all of the step's questions.",
            "algorithm.prune_fill=false",
        ),
        (
            "algorithm.prune_rate=0.5 algorithm.baseline=none algorithm.scale_advantages=none",
            "and baseline=none, scale_advantages=none, whose statistics are over",
            "algorithm.baseline=leave_one_out",
        ),
        ("algorithm.resample_rounds=1 rollout.num_generations=1", "one reward always is.", "rollout.num_generations=2"),
        ("training.prompts_per_step=4 algorithm.minibatches=5", "minibatches is 5, more", "algorithm.minibatches=4"),
        (
            "rollout.num_generations=4 algorithm.prune_rate=0.9",
            "algorithm.prune_rate with rollout.num_generations: A pruning rate of 0.9 keeps none of 4 rollouts; at "
            "least one must train. 4 rollouts allow a rate of at most 0.75, a rate of 0.9 needs at least 10 rollouts.",
            "rollout.num_generations=10",
        ),
    ],
)
def test_impossible_combinations(minimal: Path, overrides: str, words: str, remedy: str) -> None:
    """Each is refused with its fault, and with the remedy of its message it loads."""
    given = overrides.split(" ")
    assert words in refusal(minimal, *given)
    load_config(minimal, [*given, remedy])


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_files_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(write(tmp_path / "run.yaml", text))


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


def test_a_key_inside_of_a_value_or_a_list_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL + "data: {train: a.jsonl, media_root: null}\n")
    message = refusal(path, "data.train.c=c.jsonl")
    assert f"names a key inside of data.train, which is a.jsonl ({path}) and would be lost" in message
    assert "Write 'data.train=VALUE' with all of it, as in 'data.train={one: a.jsonl, two: b.jsonl}', or" in message
    assert "(command line)" in refusal(path, "data.train=b.jsonl", "data.train.c=c.jsonl")
    trackers = refusal(path, "observe.trackers=[wandb]", "observe.trackers.0=mlflow")
    assert "inside of observe.trackers, which is a list of 1 (command line)" in trackers
    assert "inside of training, which is 5 (command line)" in refusal(path, "training=5", "training.steps=1")


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
        "http://me:secret@host/v1",
        "http://host/v1?key=secret",
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


def test_all_impossible_combinations_are_named_at_once(minimal: Path) -> None:
    message = refusal(minimal, "algorithm.baseline=none", "algorithm.minibatches=999", "training.engine=deepspeed")
    assert "algorithm.scale_advantages is std" in message
    assert "algorithm.minibatches is 999" in message
    assert "training.deepspeed_config is not set" in message


def test_parts_rates_and_adapters_from_the_command_line(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.model.train == ("language",) and config.training.learning_rates == {} and config.model.lora is None
    config = load_config(minimal, ["model.train=[merger, tower]", "training.learning_rates.merger=1.0e-5"])
    assert config.model.train == ("tower", "merger") and config.training.learning_rates == {"merger": 1e-5}
    assert load_config(minimal, ["model.lora={}"]).model.lora == LoraSettings()
    config = load_config(minimal, ["model.lora.rank=4", "model.lora.target_modules=[q_proj]"])
    assert config.model.lora == LoraSettings(rank=4, target_modules=("q_proj",))


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
