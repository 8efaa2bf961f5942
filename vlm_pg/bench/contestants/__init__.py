"""The ways of computing one group's loss and gradient that are measured against each other, one per file."""

from vlm_pg.bench.contestants.base import Case, Contestant, make_case
from vlm_pg.bench.contestants.grouped import Grouped
from vlm_pg.bench.contestants.grouped_chunked import GroupedChunked
from vlm_pg.bench.contestants.prefix_grouper import PrefixGrouperKind, PrefixGrouperReadme
from vlm_pg.bench.contestants.transformers_plain import TransformersBatch, TransformersSequential

CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Grouped(),
        GroupedChunked(),
        TransformersBatch(),
        TransformersSequential(),
        PrefixGrouperReadme(),
        PrefixGrouperKind(),
    )
}

__all__ = ["CONTESTANTS", "Case", "Contestant", "make_case"]
