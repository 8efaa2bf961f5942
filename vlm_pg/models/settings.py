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

    rank: int = Field(16, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(32.0, gt=0, description="The adapter's output is multiplied by alpha / rank.")
    dropout: float = Field(0.0, description="Must be 0: a shared prefix cannot have a dropout mask per response.")
    target_modules: tuple[str, ...] = Field(
        (), description="Linear layers of the language model to adapt, such as q_proj; empty for all of them."
    )
    quantize: Literal["nf4"] | None = Field(
        None,
        description="nf4: all linear layers of the frozen language model are kept in 4 bits (QLoRA, bitsandbytes), "
        "whether adapted or not; embeddings, norms, output head, experts and vision tower stay as they are.",
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

    path: str = Field(description="Local folder or hub name of a checkpoint of Qwen-VL, or of a Qwen language model.")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Precision of weights and activations.")
    train: tuple[Part, ...] = Field(
        ("language",),
        description="The parts that train; others are frozen. tower: the vision tower's patch embedding and blocks. "
        "merger: the projector from patches to visual tokens, DeepStack's too. language: the language model with "
        "embeddings and output head. Without tower and merger visual features are kept for scoring, training and later "
        "epochs; with one of them they are made once per group and optimizer step, with gradient.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations layer by layer in backward.")
    share_prefix: bool = Field(
        True,
        description="Encode what rollouts and questions have in common once. False is for comparison: the same code "
        "computes every rollout's whole prompt by itself, vision tower included, in generation, scoring and update; "
        "slower and with more memory, with equal results up to rounding.",
    )
    attention_kernel: Literal[
        "auto", "cpu-flash", "cuda-flash", "cuda-efficient", "flash-attn-2", "flash-attn-3", "flash-attn-4", "oracle"
    ] = Field(
        "auto",
        description="Kernel behind grouped attention; auto chooses by device and dtype, never flash-attn-4, a beta.",
    )
    positions: PositionRule = Field(
        "qwen",
        description="Where text goes on after a medium. qwen: one past its largest position of any axis, as in the "
        "weights' training, vLLM and SGLang. transformers: as the installed release counts, which leaves out the time "
        "of a video.",
    )
    vision_cache_mb: int = Field(
        1024, ge=0, description="Memory for the frozen vision tower's outputs, in MiB; least recently used go first."
    )
    logits_chunk_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Memory for one chunk of fp32 logits, in MiB; chunks are recomputed in backward. auto: 256, and "
        "with gradient_checkpointing more for a long stream, up to the size of one MLP activation, which recomputing "
        "a layer needs anyway once the logits are freed.",
    )
    offload_layer_inputs: Switch = Field(
        "auto",
        description="Offload the inputs of checkpointed decoder layers, and what attention keeps for their "
        "recomputation, until backward: from a GPU into pinned host memory, overlapping the computation; from a CPU "
        "into a file. auto: if they would not fit. Needs gradient_checkpointing.",
    )
    offload_prefix_states: Switch = Field(
        "auto",
        description="The same for keys and values of prompts that run once while their responses follow in chunks, and "
        "for the fp32 sums of their gradients.",
    )
    mlp_tile_rows: Count = Field(
        "auto",
        description="Rows that MLPs and norms of decoder layers take at a time; 0: all. auto: all, unless they would "
        "not fit. A checkpointed layer computes its MLP once more in tiles.",
    )
    vision_piece_tokens: Count = Field(
        "auto",
        description="Visual tokens that the vision tower makes at a time; 0: all. A frame is never cut. auto: all, "
        "unless they would not fit. A trained tower computes its pieces again in backward.",
    )
    offload_folder: str | None = Field(
        None,
        description="Folder of the file into which a CPU's tensors are offloaded; on a disk, not in memory. None: the "
        "system's folder for temporary files.",
    )
    trust_remote_code: bool = Field(
        False, description="Let a hub model run its own Python code. Off unless you say so."
    )
    lora: LoraSettings | None = Field(
        None,
        description="Train low-rank adapters (peft) on the frozen language model instead of its weights; {} for the "
        "defaults. Checkpoints hold the adapter alone, and a KL term's reference is the model without it.",
    )
    liger: Switch = Field(
        "auto",
        description="Use liger-kernel's Triton kernels for norms, SwiGLU and rotary positions; its fused loss is never "
        "used. auto: on a GPU where the package is installed, each part whose outputs and gradients are as near to "
        "float64 as those of transformers' modules; experts of mixtures stay theirs. true: all parts, or an error.",
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
