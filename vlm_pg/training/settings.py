"""How the policy is updated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlm_pg.models.settings import Part
from vlm_pg.settings import Settings

PeakRate = Annotated[float, Field(gt=0.0)]
# Default peaks of full fine-tuning and of LoRA adapters (ten times it: https://thinkingmachines.ai/blog/lora).
LEARNING_RATE, LORA_LEARNING_RATE = 1e-6, 1e-5


class TrainingSettings(Settings):
    """Section ``training``. Batch sizes are for the whole run, over all ranks."""

    steps: int = Field(ge=1, description="Optimizer steps.")
    prompts_per_step: int = Field(16, ge=1, description="Questions per optimizer step, over all ranks.")
    micro_batch_tokens: int = Field(
        20480, ge=1, description="Token budget of one forward and backward; a shared prefix counts once."
    )
    engine: Literal["torch", "deepspeed"] = Field(
        "torch", description="Who owns optimizer and gradients. torch: all of it on every rank; deepspeed: divided"
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="So many processes in a row share the token streams of their updates, each computing its part of "
        "every prompt and its responses; for prompts beyond one device's memory. It must divide the number of "
        "processes and fit the model's heads.",
    )
    balance: bool = Field(
        True,
        description="With several data ranks: rollouts are reassigned before an update, so that all ranks have equal "
        "work by estimate, and the frames of a tower that trains are divided over all processes. False: each rank "
        "encodes and trains on what it sampled.",
    )
    deepspeed_config: str | None = Field(None, description="DeepSpeed JSON file; needed with engine=deepspeed.")
    checked_updates: int = Field(
        3,
        ge=0,
        description="With engine=deepspeed: the number of updates after every start in which the optimizer's gradient "
        "is compared with the computed one, for each weight; a difference ends the run.",
    )
    learning_rate: float = Field(
        LEARNING_RATE,
        gt=0.0,
        description="Peak learning rate. Default with model.lora: 1e-5, because adapters need about ten times the rate "
        "of full fine-tuning.",
    )
    learning_rates: dict[Part, PeakRate] = Field(
        {},
        description="Peak learning rates of parts of the model (tower, merger, language) that have another one than "
        "learning_rate, such as {tower: 2.0e-7}. Warm-up and schedule scale all alike.",
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas.")
    adam_epsilon: float = Field(1e-8, gt=0.0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW's decoupled weight decay.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises linearly from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up, to min_learning_rate_ratio."
    )
    min_learning_rate_ratio: float = Field(0.0, ge=0.0, le=1.0, description="Last learning rate / peak.")
    max_grad_norm: float = Field(1.0, gt=0.0, description="Gradients are scaled down to this global L2 norm.")
    checkpoint_every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only the last one.")
    keep_checkpoints: int = Field(2, ge=1, description="How many of the newest checkpoints stay on disk.")
    keep_best: Literal["reward", "eval/accuracy"] | None = Field(
        None,
        description="Metric by which the best checkpoint stays on disk, too. reward: the one with the highest mean "
        "over the steps since the checkpoint before. eval/accuracy: the one whose weights did best on the headline set "
        "(eval.every). checkpoints/best leads to it. Default: none.",
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
