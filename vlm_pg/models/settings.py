"""Which model is trained, and how it is held in memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from vlm_pg.settings import Settings

PositionRule = Literal["qwen", "transformers"]
Part = Literal["tower", "merger", "language"]
PARTS: tuple[Part, ...] = get_args(Part)
# Parts that make features of pixels.
VISION_PARTS: tuple[Part, ...] = ("tower", "merger")
Switch = bool | Literal["auto"]
Count = Annotated[int, Field(ge=0)] | Literal["auto"]
# Size of a chunk of fp32 logits, where ``logits_chunk_mb`` is auto; long recomputed streams may use more.
LEAST_LOGITS_MIB = 256


class LoraSettings(Settings):
    """Section ``model.lora``: y = W x + (alpha / rank) B A x with W frozen, A [rank, in] and B [out, rank] trained."""

    rank: int = Field(16, ge=1, description="Rank of the adapter: rows of A and columns of B.")
    alpha: float = Field(32.0, gt=0, description="The adapter's output is multiplied by alpha / rank.")
    dropout: float = Field(0.0, description="Must be 0: a shared prefix cannot have a dropout mask per response.")
    target_modules: tuple[str, ...] = Field(
        (), description="Linear layers of the language model to adapt, such as q_proj; empty: all of them."
    )
    quantize: Literal["nf4"] | None = Field(
        None,
        description="nf4: all linear layers of the frozen language model, adapted or not, are stored in 4 bits (QLoRA, "
        "bitsandbytes); embeddings, norms, output head, experts and vision tower are not.",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value:
            raise ValueError(
                f"dropout is {value}; it must be 0. A shared prefix is computed once for all responses, so dropout "
                "cannot differ between them, and the policy that is trained would not be the one that sampled. "
                "Set it to 0; a lower rank or weight decay regularise too."
            )
        return value


class ModelSettings(Settings):
    """Section ``model``."""

    path: str = Field(description="Local folder or hub name of a Qwen-VL checkpoint, or of a Qwen language model.")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Precision of weights and activations.")
    train: tuple[Part, ...] = Field(
        ("language",),
        description="Parts to train; the others are frozen. tower: the vision tower's patch embedding and blocks. "
        "merger: the projector from patches to visual tokens, including DeepStack's. language: the language model with "
        "embeddings and output head. If neither tower nor merger trains, visual features are computed once and reused "
        "for scoring, training and later epochs; otherwise they are recomputed, with gradient, once per group and "
        "optimizer step.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations layer by layer in backward.")
    share_prefix: bool = Field(
        True,
        description="Compute once what rollouts and questions have in common. false is for comparison: every rollout's "
        "whole prompt is computed separately, including the vision tower, in generation, scoring and update. This is "
        "slower, needs more memory and gives equal results up to rounding.",
    )
    attention_kernel: Literal[
        "auto", "cpu-flash", "cuda-flash", "cuda-efficient", "flash-attn-2", "flash-attn-3", "flash-attn-4", "oracle"
    ] = Field(
        "auto",
        description="Attention kernel used by grouped attention. auto chooses by device and dtype, never "
        "flash-attn-4 (a beta) or oracle (a slow reference).",
    )
    positions: PositionRule = Field(
        "qwen",
        description="Position id of the first token after an image or video. qwen: the largest position id of the "
        "medium on any M-RoPE axis plus 1, as in the model's pretraining, vLLM and SGLang. transformers: as the "
        "installed release computes it, which ignores a video's time axis.",
    )
    vision_cache_mb: int = Field(
        1024,
        ge=0,
        description="Memory in MiB for outputs of a frozen vision tower; the least recently used are dropped first.",
    )
    logits_chunk_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Memory in MiB for one chunk of fp32 logits; chunks are recomputed in backward. auto: 256, or more "
        "with gradient_checkpointing and long sequences, up to the size of one MLP activation, which recomputing a "
        "layer needs later anyway.",
    )
    offload_layer_inputs: Switch = Field(
        "auto",
        description="Offload the inputs of checkpointed decoder layers, and what attention keeps for their "
        "recomputation, until backward: from a GPU into pinned host memory, overlapping the computation; from a CPU "
        "into a file. auto: only if they would not fit in memory. Needs gradient_checkpointing.",
    )
    offload_prefix_states: Switch = Field(
        "auto",
        description="Offload keys and values of shared prompts whose responses run in chunks, and the fp32 sums of "
        "their gradients, as offload_layer_inputs does. auto: only if they would not fit in memory.",
    )
    mlp_tile_rows: Count = Field(
        "auto",
        description="Tokens that the MLPs and norms of decoder layers process at a time (tiling); 0: all. auto: all, "
        "unless they would not fit in memory. With gradient_checkpointing, tiling costs one additional recomputation "
        "of the MLP.",
    )
    vision_piece_tokens: Count = Field(
        "auto",
        description="Visual tokens that the vision tower processes at a time; 0: all. Frames are never split. auto: "
        "all, unless they would not fit in memory. A trained tower recomputes each piece in backward.",
    )
    offload_folder: str | None = Field(
        None,
        description="Folder of the file to which tensors are offloaded from a CPU; it should be on a disk, not in "
        "memory. null: the system's folder for temporary files.",
    )
    trust_remote_code: bool = Field(False, description="Let a model from the hub run its own Python code.")
    lora: LoraSettings | None = Field(
        None,
        description="Train low-rank adapters (peft) on the frozen language model instead of its weights; {} for the "
        "defaults. Checkpoints contain only the adapter, and the reference of a KL term is the model without it.",
    )
    liger: Switch = Field(
        "auto",
        description="Use liger-kernel's Triton kernels for norms, SwiGLU and rotary positions; its fused loss is never "
        "used. auto: on a GPU with liger-kernel installed, each kernel whose error against float64 is no larger than "
        "that of the transformers module it replaces; MoE experts keep transformers' code. true: all kernels, also for "
        "experts, without this comparison; an error if one cannot be used.",
    )

    @property
    def least_logits_bytes(self) -> int:
        """Smallest chunk of fp32 logits; the exact size where ``logits_chunk_mb`` is a number."""
        return (LEAST_LOGITS_MIB if self.logits_chunk_mb == "auto" else self.logits_chunk_mb) * 2**20

    @field_validator("train")
    @classmethod
    def _parts_in_order(cls, value: tuple[Part, ...]) -> tuple[Part, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError(
                f"train is [{', '.join(value)}]; it must name one part or more, each once. Parts are "
                f"{', '.join(PARTS)}; set it to [{', '.join(PARTS)}] for all weights."
            )
        return tuple(part for part in PARTS if part in value)

    @property
    def trains_vision(self) -> bool:
        """Visual features change with the weights: tower or merger train."""
        return any(part in self.train for part in VISION_PARTS)

    @model_validator(mode="after")
    def _offloading_needs_checkpointing(self) -> Self:
        for name in ("offload_layer_inputs", "offload_prefix_states"):
            if getattr(self, name) is True and not self.gradient_checkpointing:
                raise ValueError(
                    f"model.{name} is true and model.gradient_checkpointing is false, but without it every layer keeps "
                    f"all it computes, and nothing is won. Set model.gradient_checkpointing=true, or leave {name} out."
                )
        return self

    @model_validator(mode="after")
    def _an_adapter_trains_alone(self) -> Self:
        if self.lora is not None and self.train != ("language",):
            raise ValueError(
                f"model.lora is set and model.train is [{', '.join(self.train)}], but an adapter of the language model "
                "is all that is trained and saved with it. Set model.train=[language], or leave model.lora out."
            )
        return self
