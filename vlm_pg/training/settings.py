"""How the policy is updated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlm_pg.models.settings import Part
from vlm_pg.settings import Settings

Objective = Literal["rl", "sft", "dpo", "distill"]
PeakRate = Annotated[float, Field(gt=0.0)]
# Default peaks of full fine-tuning and of LoRA adapters (ten times it: https://thinkingmachines.ai/blog/lora).
LEARNING_RATE, LORA_LEARNING_RATE = 1e-6, 1e-5


class TrainingSettings(Settings):
    """Section ``training``. Batch sizes are for the whole run, over all ranks."""

    objective: Objective = Field(
        "rl",
        description="What the policy is trained on. rl: rewards of its own rollouts (algorithm). sft: the responses in "
        "the records (process and answer, or turns), by cross-entropy. dpo: pairs of a chosen and a rejected response "
        "(preference). distill: a teacher's distributions over the policy's own rollouts (distillation).",
    )
    steps: int = Field(ge=1, description="Optimizer steps.")
    prompts_per_step: int = Field(16, ge=1, description="Questions per optimizer step, over all ranks.")
    micro_batch_tokens: int = Field(
        20480, ge=1, description="Token budget of one forward and backward; a shared prefix counts once."
    )
    engine: Literal["torch", "deepspeed"] = Field(
        "torch",
        description="What holds gradients and optimizer states. torch: every rank holds all of them. deepspeed: they "
        "are divided over ranks by ZeRO.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Number of consecutive processes that share the token streams of their updates; each computes a "
        "part of every prompt and its responses. For prompts that exceed the memory of one device. It must divide the "
        "number of processes and fit the model's heads.",
    )
    balance: bool = Field(
        True,
        description="With several data ranks: reassign rollouts before an update so that all ranks have equal "
        "estimated work, and divide the frames for a trained vision tower over all processes. false: each rank encodes "
        "and trains on what it sampled.",
    )
    deepspeed_config: str | None = Field(None, description="DeepSpeed JSON file; required with engine=deepspeed.")
    checked_updates: int = Field(
        3,
        ge=0,
        description="With engine=deepspeed: in this many updates after every start, the optimizer's gradient of each "
        "weight is compared with the computed one; a difference ends the run.",
    )
    learning_rate: float = Field(
        LEARNING_RATE,
        gt=0.0,
        description="Peak learning rate. Default with model.lora: 1e-5, because adapters need about ten times the rate "
        "of full fine-tuning.",
    )
    learning_rates: dict[Part, PeakRate] = Field(
        {},
        description="Peak learning rates of parts of the model (tower, merger, language) that differ from "
        "learning_rate, such as {tower: 2.0e-7}. Warm-up and schedule scale all of them alike.",
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas.")
    adam_epsilon: float = Field(1e-8, gt=0.0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW's decoupled weight decay.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises linearly from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up, down to min_learning_rate_ratio."
    )
    min_learning_rate_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="Final learning rate as a share of the peak."
    )
    max_grad_norm: float = Field(1.0, gt=0.0, description="Gradients are clipped to this global L2 norm.")
    checkpoint_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only the last one.")
    keep_checkpoints: int = Field(2, ge=1, description="Number of newest checkpoints kept on disk.")
    keep_best: Literal["reward", "eval/accuracy"] | None = Field(
        None,
        description="Metric by which the best checkpoint is also kept, as checkpoints/best. reward: the highest mean "
        "reward over the steps since the previous checkpoint. eval/accuracy: the highest accuracy on the headline set "
        "(eval.every). Default: none is kept.",
    )
    torch_threads: int | None = Field(None, ge=1, description="CPU threads for torch; default: torch's own choice.")

    def impossible(self) -> list[str]:
        if self.engine == "deepspeed" and self.deepspeed_config is None:
            return [
                "training.engine is deepspeed and training.deepspeed_config is not set. DeepSpeed needs a JSON file. "
                "Set training.deepspeed_config, for example to configs/deepspeed/zero2.json."
            ]
        if self.engine == "torch" and self.deepspeed_config is not None:
            return [
                f"training.engine is torch and training.deepspeed_config is {self.deepspeed_config}, which only "
                "engine deepspeed reads. Set training.engine=deepspeed or training.deepspeed_config=null."
            ]
        return []
