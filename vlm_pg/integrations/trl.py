"""TRL's GRPOTrainer with the visual prefix encoded once per group: use GroupedGRPOTrainer in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_pg.errors import ConfigError, ModelError
from vlm_pg.integrations.padded import GroupedRows, group_rows
from vlm_pg.integrations.scoring import GroupedScorer, Scores, check_model
from vlm_pg.models.registry import FAMILIES

Scored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
MEDIA = ("mm_token_type_ids", "pixel_values", "image_grid_thw", "num_images")


class GroupedGRPOTrainer(GRPOTrainer):
    """The arguments, data, loss and gradients of TRL 1.16; only token log-probabilities are computed differently.

    Raises:
        ConfigError, ModelError: when it is built, for what cannot be computed over shared prefixes.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        check_trainer(self.args, self.model)
        self._scorers: dict[int, GroupedScorer] = {}
        self._logged: set[str] = set()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **media: Any,
    ) -> Scored:
        unknown = [name for name, value in media.items() if value is not None and name not in MEDIA]
        if unknown:
            raise ValueError(f"Grouped scoring has no {', '.join(unknown)}. {WAY_OUT}")
        config = cast(Any, self.model).config
        image_token = FAMILIES[config.model_type].image_token_id(config)
        batch = (input_ids, attention_mask, logits_to_keep)
        if image_token is not None and _has_images_in_responses(image_token, *batch, media.get("mm_token_type_ids")):
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
            return self._score_as_trl(model, *batch, batch_size=batch_size, **options, **media)
        scorer = self._scorer(model)
        rows = group_rows(*batch, scorer.policy.positions, *(media.get(name) for name in MEDIA))
        real = rows.response_mask.any(-1).tolist()
        counted = [real[row] for indices in rows.rows for row in indices]
        parts: list[Scores] = []
        done = 0
        with self.accelerator.autocast():
            for groups in rows.chunks(batch_size):
                size = sum(len(group.responses) for group in groups)
                entropy_graph = compute_entropy and self._entropy_bonus_enabled
                of_loss = counted[done : done + size] if compute_aux_loss else None
                parts.append(scorer(model, groups, self.temperature, entropy_graph=entropy_graph, counted=of_loss))
                done += size
        self._count(rows)
        logps, entropies = (rows.scatter(torch.cat(values)) for values in list(zip(*parts, strict=True))[:2])
        losses = [part.balancing_loss for part in parts if part.balancing_loss is not None]
        return logps, entropies if compute_entropy else None, torch.stack(losses).mean() if losses else None

    def _scorer(self, model: Any) -> GroupedScorer:
        """Of the policy or of the reference."""
        inner = self.accelerator.unwrap_model(model)
        if id(inner) not in self._scorers:
            fp32_head = cast(Any, self.args).cast_lm_head_to_fp32
            self._scorers[id(inner)] = GroupedScorer(inner, self.processing_class, fp32_head)
        return self._scorers[id(inner)]

    def _score_as_trl(self, model: Any, *args: Any, **kwargs: Any) -> Scored:
        """TRL's own forward scores a batch with images in responses, behind which nothing can be shared."""
        rows = args[0].shape[0]
        self._log_once(
            "images",
            f"{rows} responses of a batch with images in responses (a tool returned them) go through the model as TRL "
            "sends them; vlm_pg/rows_not_grouped counts such rows",
        )
        self._counts["vlm_pg/rows_not_grouped"].append(float(rows))
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _count(self, rows: GroupedRows) -> None:
        self._log_once("first", rows.summary)
        grouped, repeated = rows.tokens
        self._counts["vlm_pg/tokens_saved"].append(float(repeated - grouped))
        self._counts["vlm_pg/sharing_ratio"].append(repeated / grouped)

    @property
    def _counts(self) -> Any:
        return self._metrics["train" if cast(Any, self.model).training else "eval"]

    def _log_once(self, key: str, line: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self.accelerator.print(f"vlm_pg: {line}")


def _has_images_in_responses(
    image_token: int,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_columns: int,
    mm_token_type_ids: torch.Tensor | None,
) -> bool:
    """Whether an image token stands in a response, or where the batch marks no image."""
    image_tokens = (input_ids == image_token) & attention_mask.bool()
    known = torch.zeros_like(image_tokens) if mm_token_type_ids is None else mm_token_type_ids == 1
    known[:, -response_columns:] = False
    return bool((image_tokens & ~known).any())


WAY_OUT = "Leave it out, or use TRL's GRPOTrainer."


def check_trainer(args: Any, model: Any) -> None:
    """Refuse settings and models with which training would differ from TRL's.

    Args:
        args: TRL's GRPOConfig.
        model: the trainer's model, not wrapped.

    Raises:
        ConfigError: settings; all of them are named.
        ModelError: another family, dropout.
    """
    refused = list(_refused_settings(args, model))
    if refused:
        raise ConfigError(f"GroupedGRPOTrainer cannot take {'; nor '.join(refused)}. {WAY_OUT}")
    try:
        check_model(model)
    except ModelError as error:
        dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
        if not (dropout and args.disable_dropout):
            raise
        raise ModelError(
            f"{error} disable_dropout=True reaches the dropout modules of a model only; Qwen-VL's attention drops by "
            "the number in its config."
        ) from error


def _refused_settings(args: Any, model: Any) -> Iterator[str]:
    """Each with the reason and what would be allowed."""
    # transformers' new name for it and, under releases that have it not, the old one.
    options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and options and options.get("use_reentrant") is not False:
        yield (
            "gradient_checkpointing_kwargs without use_reentrant=False (torch then recomputes a layer apart from the "
            "rest, which loses the gradient that goes through the shared prefix; add it, or give no such arguments)"
        )
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha (each copy of a prompt would get noise of its own, and there is one copy)"
    if args.fsdp:
        yield (
            "fsdp (parts of a layer are called, whose weights FSDP does not gather then; "
            "DistributedDataParallel is right)"
        )
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        yield (
            "deepspeed with ZeRO-3 (ranks gather weights together, and do not encode equally many pictures; ZeRO-2 is "
            "right)"
        )
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config (layers split over devices are not tested)"
    if args.torch_compile:
        yield "torch_compile (the layers are called one by one, outside the compiled forward)"
    if args.use_liger_kernel:
        yield "use_liger_kernel (not compared with TRL's)"
    for name in ("fp16", "fp16_full_eval"):
        if getattr(args, name):
            yield f"{name} (not compared with TRL's; bf16 is)"
    suppressed = (args.generation_kwargs or {}).get("suppress_tokens", ())
    family = FAMILIES.get(model.config.model_type)
    image_token = family and family.image_token_id(model.config)
    replaces_list = image_token is not None and "suppress_tokens" in (args.generation_kwargs or {})
    if replaces_list and image_token not in (suppressed or ()):
        yield (
            "generation_kwargs with suppress_tokens without the image token (it takes the place of TRL's own list, "
            f"and a sampled image token ends the run; add {image_token})"
        )
