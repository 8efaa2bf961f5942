"""Runs of TRL's trainer that touch every option of GRPOConfig, and the comparison of both trainers on one of them.

``python -m tests.support.trl_cases NAME FOLDER`` runs a case in a process of its own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from PIL import Image
from trl import chat_template_utils
from trl.trainer import grpo_trainer

from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.trl import MEDIA_TOKENS, Inputs, Recorded, largest_error
from vlm_pg.integrations.trl import GroupedGRPOTrainer


@dataclass(frozen=True)
class Case:
    """``settings``: arguments of GRPOConfig. ``options``: of Recorded. ``prepare``: called before each run."""

    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[pytest.MonkeyPatch], None] | None = None
    evaluate: bool = False
    rounded: bool = False
    default_suite: bool = False


def off_policy(inputs: Inputs) -> Inputs:
    """Ratios away from 1 on both sides, where the losses differ from one another."""
    old = inputs.get("old_per_token_logps")
    if old is None:
        return inputs
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    return inputs | {"old_per_token_logps": old + 0.3 * noise}


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def vowel_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in c[0]["content"])) for c in completions]


class FakeVLLM:
    """Instead of vLLM: words drawn from a seed, and log-probabilities that are a little off."""

    def __init__(self, **settings: Any):
        self.settings = settings
        self._generator = torch.Generator().manual_seed(0)

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        lengths = torch.randint(2, 8, (len(prompts),), generator=self._generator).tolist()
        ids = [torch.randint(20, 300, (n,), generator=self._generator).tolist() for n in lengths]
        logps = [(-6 + 0.6 * torch.randn(n, 1, generator=self._generator)).tolist() for n in lengths]
        return None, ids, logps, None


def with_fake_vllm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grpo_trainer, "VLLMGeneration", FakeVLLM)


def perturbed_reference(run: Recorded) -> None:
    """A reference that differs a little, so that the KL term has a gradient."""
    with torch.no_grad():
        for parameter in run.trainer.ref_model.parameters():
            parameter.mul_(1.01)


def sampled_media(patch: pytest.MonkeyPatch) -> None:
    """Every sampled response gets the tokens that stand around a video, as a model may write them."""
    generate = grpo_trainer.GRPOTrainer._generate_single_turn
    ids = tiny_tokenizer().convert_tokens_to_ids(["<|vision_start|>", "<|video_pad|>", "<|vision_end|>"])

    def with_media(self: Any, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = generate(self, *args, **kwargs)
        return [[*c[:1], *ids, *c[4:]] for c in completions], logprobs

    patch.setattr(grpo_trainer.GRPOTrainer, "_generate_single_turn", with_media)


def with_tone(processor: Any) -> Any:
    processor.chat_template = "{{ tone }}" + processor.chat_template
    return processor


def with_tool_template(processor: Any) -> Any:
    processor.chat_template = chat_template_utils.qwen3_vl_chat_template
    return processor


def only_tokenizer(processor: Any) -> Any:
    processor.tokenizer.chat_template = CHAT_TEMPLATE
    return processor.tokenizer


def look(times: int) -> str:
    """Looks closer.

    Args:
        times: how often.

    Returns:
        What is seen.
    """
    return f"It is red, {times} times."


def look_at_picture(times: int) -> list[dict[str, Any]]:
    """Looks closer.

    Args:
        times: how often.

    Returns:
        A part of the picture.
    """
    return [{"type": "image", "image": Image.new("RGB", (64, 32 * times), "red")}, {"type": "text", "text": "Here."}]


look_at_picture.__name__ = "look"


def tool_callers(patch: pytest.MonkeyPatch) -> None:
    """About every second response is read as a call of the tool, whatever the tiny model wrote."""

    def parse(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        if sum(ids) % 2:
            function = {"name": "look", "arguments": {"times": 2}}
            answer["tool_calls"] = [{"type": "function", "function": function}]
        return answer

    patch.setattr(grpo_trainer, "parse_response", parse)


def _tools(tool: Callable[..., Any], **settings: Any) -> Case:
    options = {"family": "qwen3_vl", "processing": with_tool_template, "trainer": {"tools": [tool]}}
    return Case(CALLS | settings, options, prepare=tool_callers)


SUPPRESSED = tiny_tokenizer().convert_tokens_to_ids(list(MEDIA_TOKENS))
OFF: dict[str, Any] = {"alter": off_policy}
TWICE: dict[str, Any] = {"num_iterations": 2, "epsilon": 0.1}
VLLM: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_correction": True}
REWARDS: dict[str, Any] = {"trainer": {"reward_funcs": [length_reward, vowel_reward]}}
# Long enough for a call, what the tool says, and an answer.
CALLS: dict[str, Any] = {
    "max_completion_length": 160,
    "generation_kwargs": {"max_new_tokens": 8, "suppress_tokens": SUPPRESSED},
    "beta": 0.1,
}


def _vllm(default_suite: bool = False, **settings: Any) -> Case:
    return Case(VLLM | settings, prepare=with_fake_vllm, default_suite=default_suite)


def _loss(**settings: Any) -> Case:
    return Case(TWICE | settings, OFF)


# Where TRL's defaults are left: the size of model and batch, the length of a response, the number of steps.
AT_DEFAULTS: dict[str, Any] = {
    "bf16": True,
    "gradient_checkpointing": True,
    "temperature": 1.0,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "num_generations": 8,
    "adam_epsilon": 1e-8,
    "generation_kwargs": None,
}

CASES: dict[str, Case] = {
    "defaults": Case(AT_DEFAULTS, rounded=True),
    "defaults in fp32": Case(AT_DEFAULTS | {"bf16": False}),
    "defaults of a mixture in fp32": Case(AT_DEFAULTS | {"bf16": False}, {"family": "qwen3_vl_moe"}),
    "defaults of a mixture": Case(AT_DEFAULTS, {"family": "qwen3_vl_moe"}, rounded=True),
    "mixture": Case(
        {"router_aux_loss_coef": 0.5, "activation_checkpointing": True}, {"family": "qwen3_vl_moe"}, default_suite=True
    ),
    "mixture, in passes": Case(
        {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
         "mask_truncated_completions": True}, {"family": "qwen3_5_moe"}
    ),
    "mixture without balancing": Case({"router_aux_loss_coef": 0.0}, {"family": "qwen3_vl_moe"}),
    "entropy": Case({"entropy_coef": 0.5}),
    "adaptive entropy": Case(
        {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_target": 9.0, "entropy_coef_delta": 0.2,
         "entropy_coef_min": 0.1, "entropy_coef_max": 0.6, "top_entropy_quantile": 0.5,
         "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        default_suite=True,
    ),
    "entropy of uncertain tokens": Case({"top_entropy_quantile": 0.4}),
    "fp32 head": Case({"cast_lm_head_to_fp32": True, "bf16": True}, rounded=True),
    "fp32 head in fp32": Case({"cast_lm_head_to_fp32": True}),
    "bf16 weights": Case({"model_init_kwargs": {"dtype": "bfloat16"}}, rounded=True),
    "media in responses": Case({}, prepare=sampled_media, default_suite=True),
    "checkpointing": Case(
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    ),
    "old names of checkpointing": Case(
        {"gradient_checkpointing": True,
         "gradient_checkpointing_kwargs": {"preserve_rng_state": False, "use_reentrant": False}}, default_suite=True
    ),
    "grpo": _loss(loss_type="grpo", epsilon_high=0.2, delta=1.5),
    "bnpo": _loss(loss_type="bnpo"),
    "dr_grpo": _loss(loss_type="dr_grpo", scale_rewards="none"),
    "dapo": _loss(loss_type="dapo", epsilon_high=0.2, delta=1.2),
    "cispo": _loss(loss_type="cispo", epsilon_high=1.1),
    "sapo": _loss(loss_type="sapo", sapo_temperature_neg=1.5, sapo_temperature_pos=0.8),
    "luspo": _loss(loss_type="luspo", importance_sampling_level="sequence"),
    "gspo": _loss(loss_type="grpo", importance_sampling_level="sequence"),
    "vespo": _loss(
        loss_type="vespo", vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=2.0, vespo_lambda_neg=1.0
    ),
    "off-policy mask": _loss(off_policy_mask_threshold=0.01),
    "kl": Case(TWICE | {"beta": 0.3}, OFF | {"after": perturbed_reference}, default_suite=True),
    "kl, biased": Case(TWICE | {"beta": 0.3, "use_bias_correction_kl": False}, OFF | {"after": perturbed_reference}),
    "moving reference": Case(
        {"beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    ),
    "truncated": Case({"mask_truncated_completions": True, "loss_type": "grpo"}),
    "rewards of the batch": Case({"scale_rewards": "batch"}),
    "several rewards": Case({"reward_weights": [1.0, 0.3]}, REWARDS),
    "rewards apart": Case(
        {"reward_weights": [1.0, 0.3], "multi_objective_aggregation": "normalize_then_sum"}, REWARDS
    ),
    "sampling": Case(
        {"top_p": 0.9, "top_k": 40, "min_p": 0.001, "repetition_penalty": 1.2, "temperature": 1.3,
         "max_completion_length": 6, "generation_kwargs": {"suppress_tokens": SUPPRESSED, "no_repeat_ngram_size": 2}},
    ),
    "static cache": Case({"cache_implementation": "static"}),
    "chat template": Case({"chat_template_kwargs": {"tone": "loud"}}, {"processing": with_tone}),
    "batches": Case(
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4,
         "num_generations": 2, "shuffle_dataset": False, "data_seed": 7, "seed": 11, "dataloader_drop_last": True},
        default_suite=True,
    ),
    "generation batch": Case(
        {"generation_batch_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
         "pad_to_multiple_of": 8}
    ),
    "optimizer": Case(
        {"optim": "adamw_torch", "optim_args": "amsgrad=True", "weight_decay": 0.1, "adam_beta1": 0.8,
         "adam_beta2": 0.9, "adam_epsilon": 1e-4, "lr_scheduler_type": "cosine_with_min_lr",
         "lr_scheduler_kwargs": {"min_lr": 1e-4},
         "warmup_steps": 1, "max_grad_norm": 0.5, "learning_rate": 1e-4}
    ),
    "epochs, plain descent": Case({"optim": "sgd", "num_train_epochs": 2.0, "max_steps": -1}),
    "deterministic": Case({"full_determinism": True, "use_cache": True, "disable_dropout": True}),
    "evaluation": Case(
        {"num_generations_eval": 2, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1,
         "beta": 0.1, "eval_on_start": True, "entropy_coef": 0.1},
    ),
    "evaluation in bf16": Case(
        {"bf16_full_eval": True, "num_generations_eval": 2, "per_device_eval_batch_size": 2},
        evaluate=True, rounded=True,
    ),
    "tools": _tools(look, max_tool_calling_iterations=1),
    "tools that return images": _tools(look_at_picture, max_tool_calling_iterations=2),
    # Old log-probabilities are scored without gradient; the groups are scattered over two batches.
    "iterations": Case({"num_iterations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2}),
    "a text model": Case({"generation_kwargs": {}}, {"family": "qwen2", "pictures": False}, default_suite=True),
    "words alone": Case({}, {"processing": only_tokenizer, "pictures": False}),
    "continuous batching": Case(
        {"use_transformers_continuous_batching": True,
         "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 256}},
        {"processing": only_tokenizer, "pictures": False},
    ),
    "vllm": _vllm(True),
    "vllm, tokens cut": _vllm(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.2),
    "vllm, tokens masked": _vllm(
        vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=None,
        vllm_importance_sampling_clip_min=0.7,
    ),
    "vllm, responses cut": _vllm(vllm_importance_sampling_mode="sequence_truncate", vllm_importance_sampling_cap=1.2),
    "vllm, uncorrected": _vllm(vllm_importance_sampling_correction=False, off_policy_mask_threshold=0.01),
    "vllm, vespo": _vllm(vllm_importance_sampling_mode="token_mask", loss_type="vespo"),
}  # fmt: skip

# Settings of vLLM alone, compared in: test_vllm_gets_what_trl_gives_it.
FOR_VLLM: dict[str, object] = {
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "[a-z]+",
    "vllm_server_base_url": "http://127.0.0.1:1",
    "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 1,
    "vllm_server_timeout": 1.0,
    "vllm_group_port": 2,
    "vllm_gpu_memory_utilization": 0.2,
    "vllm_max_model_length": 64,
    "vllm_tensor_parallel_size": 1,
}

# Refused by GroupedGRPOTrainer when it is built; docs/library.md names each. deepspeed: ZeRO-3.
REFUSED = (
    *("neftune_noise_alpha", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel"),
    *("liger_kernel_config", "fp16", "fp16_full_eval", "fsdp", "fsdp_config", "deepspeed"),
    *("ds3_gather_for_generation", "parallelism_config"),
)


# Options without an effect on the compared training: reason -> names.
NO_EFFECT: dict[str, str] = {
    name: reason
    for reason, names in {
        "which files are kept; scoring has no state that a checkpoint would need": (
            "output_dir save_only_model save_strategy save_steps save_on_each_node save_total_limit "
            "enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
            "hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better "
            "ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint trust_remote_code"
        ),
        "which weights an optimizer projects; it is given the same gradients": "optim_target_modules",
        "of transformers' own loss, which GRPO's trainer replaces": (
            "average_tokens_across_devices label_smoothing_factor"
        ),
        "precision of a GPU's products, in both alike": "tf32",
        "when memory is handed back": "torch_empty_cache_steps",
        "refused by TRL's own GRPOConfig": "auto_find_batch_size",
        "what is written where, and how often": (
            "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
            "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project "
            "trackio_space_id trackio_bucket_id trackio_static_space_id log_completions log_multimodal "
            "num_completions_to_print log_unique_prompts log_completions_hub_repo debug skip_memory_metrics"
        ),
        "when, and in what pieces, evaluation runs": (
            "eval_delay prediction_loss_only eval_do_concat_batches eval_use_gather_object "
            "eval_accumulation_steps include_for_metrics batch_eval_metrics do_train do_eval do_predict"
        ),
        "how processes talk to each other; test_two_processes_sum_the_same_gradients runs two": (
            "accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_static_graph ddp_backend ddp_timeout local_rank"
        ),
        "how samples reach the process that asks for them": (
            "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
            "remove_unused_columns label_names train_sampling_strategy length_column_name"
        ),
        "the old name of use_transformers_continuous_batching": "use_transformers_paged",
    }.items()
    for name in names.split()
}

# Metrics of time, and those that only one of the two trainers writes.
NOT_COMPARED = ("step_time", "runtime", "per_second", "vlm_pg/")


# An epsilon that keeps Adam from turning a gradient that is rounding noise into a whole learning rate.
BASE: dict[str, Any] = {"max_steps": 3, "adam_epsilon": 1e-2}


def run(case: Case, trainer_class: type, folder: Path, **others: Any) -> Recorded:
    """Three steps of one trainer."""
    with pytest.MonkeyPatch.context() as patch:
        if case.prepare is not None:
            case.prepare(patch)
        options = dict(case.options)
        after = options.pop("after", None)
        recorded = Recorded(trainer_class, folder, **options, **(BASE | case.settings | others))
        if after is not None:
            after(recorded)
        if case.evaluate:
            torch.manual_seed(0)
            recorded.trainer.evaluate()
        else:
            recorded.trainer.train()
    return recorded


def compare(case: Case, folder: Path) -> tuple[Recorded, Recorded]:
    """Run both trainers and raise AssertionError where they differ."""
    with same_responses(None) as responses:
        theirs = run(case, trl.GRPOTrainer, folder)
    # Half precision samples other tokens soon, whatever weights differ by. In fp32 ours must sample the same by itself.
    with same_responses(responses if case.rounded else None) as own:
        ours = run(case, GroupedGRPOTrainer, folder)
    assert own == responses
    for mine, expected in zip(ours.inputs, theirs.inputs, strict=True):
        assert torch.equal(mine["completion_ids"], expected["completion_ids"])
        torch.testing.assert_close(mine["advantages"], expected["advantages"])
    if case.rounded:
        with same_responses(responses):
            exact = run(case, trl.GRPOTrainer, folder, **EXACT)
        _assert_near(ours, theirs, exact)
    else:
        assert_equal(ours, theirs)
    return ours, theirs


EXACT: dict[str, Any] = {"bf16": False, "bf16_full_eval": False, "model_init_kwargs": {"dtype": "float32"}}


@contextmanager
def same_responses(first: list[Any] | None) -> Iterator[list[Any]]:
    """What a run generates, in order; with ``first``'s list the run gets that instead of its own."""
    generate = grpo_trainer.GRPOTrainer._generate_single_turn
    generated: list[Any] = []

    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = generate(self, *args, **kwargs)
        generated.append(own if first is None else first[len(generated)])
        return copy.deepcopy(generated[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer.GRPOTrainer, "_generate_single_turn", replay)
        yield generated


def assert_equal(ours: Recorded, theirs: Recorded) -> None:
    assert len(theirs.losses) == len(ours.losses) > 0
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4, abs=1e-4)
    assert len(theirs.gradients) == len(ours.gradients)
    assert not theirs.gradients or any(g.any() for step in theirs.gradients for g in step.values())
    for step, (mine, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        if not any(gradient.any() for gradient in expected.values()):
            assert not any(gradient.any() for gradient in mine.values())
            continue
        error, name = largest_error(mine, expected)
        assert error <= 1e-4, f"gradient of {name} at step {step}: {error}"
    _assert_metrics(ours, theirs, 1e-4)


def _assert_metrics(ours: Recorded, theirs: Recorded, tolerance: float) -> None:
    histories = (theirs.trainer.state.log_history, ours.trainer.state.log_history)
    assert len(histories[0]) == len(histories[1]) > 0
    for expected, mine in zip(*histories, strict=True):
        for key, value in expected.items():
            if any(part in key for part in NOT_COMPARED):
                continue
            assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def _assert_near(ours: Recorded, theirs: Recorded, exact: Recorded) -> None:
    """Half precision: ours is no farther from TRL's, and from the truth, than twice what TRL's is from the truth."""
    differ = [abs(a - b) for a, b in zip(theirs.losses, exact.losses, strict=True)]
    assert ours.losses == pytest.approx(theirs.losses, abs=2 * max(differ) + 1e-3)
    if theirs.gradients:
        mine, expected, true = (_all_gradients(recorded) for recorded in (ours, theirs, exact))
        rounding = (expected - true).norm()
        assert 0 < rounding < 0.3 * true.norm()
        assert (mine - expected).norm() <= 2 * rounding
        assert (mine - true).norm() <= 2 * rounding
    _assert_metrics(ours, theirs, 0.1)


def _all_gradients(recorded: Recorded) -> torch.Tensor:
    """Of all steps and parameters as one vector."""
    return torch.cat([step[name].float().flatten() for step in recorded.gradients for name in sorted(step)])


def main() -> None:
    torch.set_num_threads(1)
    compare(CASES[sys.argv[1]], Path(sys.argv[2]))
    print("equal")


if __name__ == "__main__":
    main()
