"""The part of a run's configuration that decides about memory, and the largest pass that the run will make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlm_pg.memory import GIB
from vlm_pg.models.memory_choice import smallest
from vlm_pg.models.memory_sizes import TowerShape
from vlm_pg.models.settings import VISION_PARTS, Part
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.plan.shape import ModelShape

BYTES = {"fp32": 4, "bf16": 2}
# Tokens of text around the media of a question, roughly.
TEXT_TOKENS = 512
NO_MEASURES = MemoryChoice()
OFFLOADS = ("offload_layer_inputs", "offload_prefix_states")


@dataclass(frozen=True)
class Setup:
    """How a run holds its model, and the sizes of its passes.

    Attributes:
        element: bytes of a weight and of an activation.
        train: parts of the model that train; of the language model an adapter alone with ``lora``,
            beside which with ``quantize`` its linear layers are in 4 bits.
        stage: ZeRO stage; 0 for one process without DeepSpeed.
        ranks: processes, among which states are scattered; ``sequence_parallel`` of them work on one stream.
        prefix: tokens of the largest prompt; ``patches``: of its media.
        response: stream tokens of the longest response; ``generations``: how many of a group.
        budget: most tokens of a pass.
        prompts: prompts that a rank holds in a step, whose tower graphs a trained tower keeps.
        logits_bytes: of a chunk of fp32 logits; ``logits_follow``: where layers are recomputed a chunk may have more,
            by the length of the stream.
        entropy_bonus: entropies of the responses' tokens have a gradient.
        reference: another copy of the weights, for a KL term.
        bucket: elements of DeepSpeed's buffers for reducing gradients; 0 without.
        divides_prompts: each sequence rank keeps its part of a prompt's keys and values; ``may_divide_prompts``: where
            they do not fit whole.
        measures: tensors offloaded, tiled or cut; ``allowed``: all that the run itself may choose at its start;
            ``offloads_with_checkpointing``: fields of it that the run may also choose where layers are recomputed.
        prompts_of_step: of all ranks; 0: those of this rank on each. ``least_budget``: the smallest that the lengths
            in the configuration allow; 0: the largest prompt and a response.
        part_rates: parts of the model have learning rates of their own.
        keep_forward: bytes for recorded forwards, at most; None: what is left, as always on a GPU, whose host has the
            rest. ``room_for_forwards``: what they take. ``recorded``: updates start from them.
        updates: of a step; the first one starts from recorded forwards.
    """

    element: int = 2
    checkpointing: bool = True
    train: tuple[Part, ...] = ("language",)
    lora: bool = False
    quantize: bool = False
    stage: int = 0
    ranks: int = 1
    sequence_parallel: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    live_parameters: int = 10**9
    bucket: int = 0
    prefix: int = 16_384
    patches: int = 0
    response: int = 768
    generations: int = 8
    budget: int = 20_480
    prompts: int = 1
    logits_bytes: int = 256 * 2**20
    logits_follow: bool = False
    entropy_bonus: bool = False
    reference: bool = False
    share_prefix: bool = True
    divides_prompts: bool = False
    may_divide_prompts: bool = False
    measures: MemoryChoice = NO_MEASURES
    allowed: MemoryChoice = NO_MEASURES
    offloads_with_checkpointing: tuple[str, ...] = OFFLOADS
    prompts_of_step: int = 0
    least_budget: int = 0
    part_rates: bool = False
    keep_forward: float | None = None
    room_for_forwards: float = 0.0
    recorded: bool = False
    updates: int = 1

    @property
    def trains_vision(self) -> bool:
        """Visual features change with the weights."""
        return any(part in self.train for part in VISION_PARTS)

    @property
    def prompts_sampled(self) -> int:
        """Prompts per step whose rollouts this rank samples alone; 0 if all sequence ranks sample each prompt."""
        together = self.divides_prompts or self.prompts < self.sequence_parallel
        return 0 if together and self.sequence_parallel > 1 else -(-self.prompts // self.sequence_parallel)

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that optimizer states are sharded over."""
        return self.ranks if self.stage else 1

    @property
    def stream(self) -> int:
        """Tokens of the largest single pass, or of prompts and their largest chunk."""
        return max(min(self.budget, self.prompts * self.group), self.prefix + self.response)

    @property
    def group(self) -> int:
        """Tokens of the largest group, its prefix once."""
        return self.prefix + self.generations * self.response

    @property
    def chunked(self) -> bool:
        """Whether the largest group goes beyond the budget, so that its prefix runs by itself."""
        return self.share_prefix and self.group > self.budget

    @property
    def read_rows(self) -> int:
        """Rows that predict a token in a pass: those of the responses."""
        if self.chunked:
            return max(self.response, self.stream - self.prefix)
        groups = max(1, self.stream // self.group)
        return min(self.stream, groups * self.generations * self.response)


def setup_of(config: Any, shape: ModelShape, ranks: int) -> Setup:
    """The setup of a run's configuration (``RunConfig``) on so many processes.

    Raises:
        ConfigError: a DeepSpeed file that cannot be used.
    """
    from vlm_pg.training.deepspeed_config import offloads_optimizer, read_deepspeed_config

    zero: dict[str, Any] = {}
    offloads = False
    if config.training.engine == "deepspeed":
        file = read_deepspeed_config(config.training)
        zero, offloads = file["zero_optimization"], offloads_optimizer(file)
    model, rollout, sequence_parallel = config.model, config.rollout, config.training.sequence_parallel
    data_ranks = max(1, ranks // sequence_parallel)
    together = rollout.split != "questions" and rollout.gather != "layers"
    prefix, patches = largest_prompt(config, shape.tower)
    # As ``forward_fault`` of a run, without what only its ranks and its model show.
    computed = rollout.engine == "server" or not model.share_prefix or model.attention_kernel == "oracle"
    computed |= rollout.logprobs == "recompute" and config.algorithm.updates > 1
    computed |= sequence_parallel > 1 and rollout.split == "prompts"
    computed |= config.training.objective != "rl"
    keep_forward = 0.0 if computed else rollout.keep_forward_gb
    buckets = 2 if zero.get("overlap_comm") else 1
    return Setup(
        element=BYTES[model.dtype],
        checkpointing=model.gradient_checkpointing,
        train=model.train,
        lora=model.lora is not None,
        quantize=model.lora is not None and model.lora.quantize is not None,
        stage=int(zero.get("stage", 0)),
        ranks=ranks,
        sequence_parallel=sequence_parallel,
        offload_optimizer=offloads,
        offload_parameters=(zero.get("offload_param") or {}).get("device", "none") != "none",
        live_parameters=int(float(zero.get("stage3_max_live_parameters", 1e9))),
        bucket=buckets * int(float(zero.get("reduce_bucket_size", 5e8))) if zero else 0,
        prefix=prefix,
        patches=patches,
        response=max(1, rollout.max_new_tokens - 1),
        generations={"sft": 1, "dpo": 2}.get(config.training.objective, rollout.num_generations),
        budget=config.training.micro_batch_tokens,
        prompts=-(-config.training.prompts_per_step // data_ranks),
        logits_bytes=model.least_logits_bytes,
        logits_follow=model.logits_chunk_mb == "auto",
        entropy_bonus=config.algorithm.entropy_coef > 0,
        reference=_has_second_model(config),
        share_prefix=model.share_prefix,
        divides_prompts=rollout.divide_prefix == "always",
        may_divide_prompts=rollout.divide_prefix != "never" and together,
        measures=MemoryChoice.of(model),
        allowed=smallest(model),
        offloads_with_checkpointing=tuple(n for n in OFFLOADS if getattr(model, n) == "auto"),
        prompts_of_step=config.training.prompts_per_step,
        least_budget=config.prompt.max_prompt_tokens + rollout.max_new_tokens,
        part_rates=bool(config.training.learning_rates),
        keep_forward=keep_forward and keep_forward * GIB,
        updates=config.algorithm.updates,
    )


def largest_prompt(config: Any, tower: TowerShape | None) -> tuple[int, int]:
    """Tokens of the largest prompt that is taken, and patches of one with the largest video ``media`` allows.

    Records that name their moments may show more frames; how many is not known here.
    """
    limit = config.prompt.max_prompt_tokens
    if tower is None:
        return limit, 0
    media = config.media
    visual = video_tokens(media.most_frames, media.max_pixels, tower)
    if media.video_tokens is not None:
        visual = min(visual, media.video_tokens)
    prefix = min(limit, visual + TEXT_TOKENS)
    return prefix, min(visual, prefix) * tower.patches_per_token


def video_tokens(frames: int, pixels: int, tower: TowerShape) -> int:
    """Visual tokens of a video: two frames make one temporal patch in all of these towers."""
    # tower.pixels = channels (3) * temporal (2) * side ** 2
    return frames // 2 * pixels // (tower.pixels // 6 * tower.patches_per_token)


def _has_second_model(config: Any) -> bool:
    """A reference with weights of its own, or a teacher, which is counted as one."""
    scores = bool(config.algorithm.kl_coef) or config.training.objective == "dpo"
    own = config.preference.reference or config.distillation.teacher
    return bool(own) or (scores and config.model.lora is None)
