"""TRL's GRPOTrainer with the visual prefix encoded once per group: use GroupedGRPOTrainer in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_pg.integrations.padded import group_rows
from vlm_pg.integrations.scoring import GroupedScorer


class GroupedGRPOTrainer(GRPOTrainer):
    """The arguments, data, loss and gradients of TRL 1.16; only token log-probabilities are computed in another way."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._scorers: dict[int, GroupedScorer] = {}

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: Sequence[int] | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        unknown = [name for name, value in others.items() if value is not None]
        unknown += ["auxiliary loss (router_aux_loss_coef=0 turns it off)"] * compute_aux_loss
        unknown += ["cast_lm_head_to_fp32"] * cast(Any, self.args).cast_lm_head_to_fp32
        if unknown:
            raise ValueError(f"Grouped scoring has no {', '.join(unknown)}. Leave it out, or use TRL's GRPOTrainer.")
        inner = self.accelerator.unwrap_model(model)
        first = not self._scorers
        if id(inner) not in self._scorers:
            self._scorers[id(inner)] = GroupedScorer(inner, self.processing_class)
        score = self._scorers[id(inner)]
        media = (mm_token_type_ids, pixel_values, image_grid_thw, num_images)
        rows = group_rows(input_ids, attention_mask, logits_to_keep, score.policy.positions, *media)
        with self.accelerator.autocast():
            parts = [score(model, groups, self.temperature) for groups in rows.chunks(batch_size)]
        logps, entropies = (rows.scatter(torch.cat(part)) for part in zip(*parts, strict=True))
        if first:
            self.accelerator.print(f"vlm_pg: {rows.summary}")
        grouped, repeated = rows.tokens
        metrics = self._metrics["train" if cast(Any, self.model).training else "eval"]
        metrics["vlm_pg/tokens_saved"].append(float(repeated - grouped))
        metrics["vlm_pg/sharing_ratio"].append(repeated / grouped)
        return logps, entropies if compute_entropy else None, None
