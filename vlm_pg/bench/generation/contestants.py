"""Everybody who generates, by name."""

from vlm_pg.bench.generation.base import Generator
from vlm_pg.bench.generation.ours import SEPARATE, TOGETHER
from vlm_pg.bench.generation.transformers_continuous import TransformersContinuous
from vlm_pg.bench.generation.transformers_generate import TransformersGenerate

GENERATORS: dict[str, Generator] = {
    generator.name: generator for generator in (TOGETHER, TransformersGenerate(), TransformersContinuous(), SEPARATE)
}
