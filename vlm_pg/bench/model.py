"""``vlm-pg bench model``: what arithmetic alone says about sharing the prefix, for public models.

Operations of forward and backward with checkpointing, and activation memory, prefix repeated in one batch against
prefix shared; from the numbers in their configurations (``shapes.py``) and the formulas in ``flops.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from vlm_pg.bench.flops import CHUNK_BYTES, activation_bytes, parameter_count, step_flops
from vlm_pg.bench.grid import GENERATIONS, PREFIXES, RATIOS
from vlm_pg.bench.shapes import PUBLISHED, LanguageShape
from vlm_pg.bench.work import repeated_work, shared_work
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB

BF16_BYTES = 2

_NOTES = """\
# What arithmetic alone says about sharing the prefix

FLOPs: prefix repeated over prefix shared, forward and backward with checkpointing; one multiply-add is two
operations, attention counts causal pairs only, logits response tokens only. Memory: activations in bf16 with
checkpointing (each layer's input, one layer recomputed, on the shared side also each layer's attention output, logits
in chunks of 256 MiB on both sides), without weights, gradients and optimizer. Gated linear-attention layers count by
their recurrence; sharing them means starting each response from the state at the prefix's end. Ratio is prefix tokens
per response token.
"""


def main(argv: Sequence[str]) -> int:
    """Run from the command line."""
    arguments = _parser().parse_args(argv)
    unknown = [name for name in arguments.models if name not in PUBLISHED]
    if unknown:
        raise ConfigError(f"--models got {unknown[0]!r}; known are {', '.join(PUBLISHED)}.")
    text = _NOTES + "".join(
        model_table(name, PUBLISHED[name], arguments.prefix, arguments.ratios, arguments.generations)
        for name in arguments.models
    )
    if arguments.out:
        arguments.out.write_text(text)
        print(f"written to {arguments.out}")
    else:
        print(text, end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlm-pg bench model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(PUBLISHED)
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), metavar="NAME", help=f"of {names}")
    parser.add_argument("--prefix", type=int, nargs="+", default=PREFIXES, metavar="P", help="prefix lengths, tokens")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, metavar="P/R", help="prefix per response")
    parser.add_argument("--generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="responses")
    parser.add_argument("--out", type=Path, help="Markdown file; default: the terminal")
    return parser


def model_table(
    name: str, shape: LanguageShape, prefixes: Iterable[int], ratios: Iterable[float], generations: Sequence[int]
) -> str:
    """A Markdown table; a cell holds the ratio of operations and the memory of both sides in GiB."""
    lines = [
        f"\n### {name} ({parameter_count(shape) / 1e9:.1f} B parameters in the language model)\n",
        "| prefix | ratio | " + " | ".join(f"G={count}" for count in generations) + " |",
        "|---|---|" + "---|" * len(generations),
    ]
    ratios = list(ratios)
    for prefix in prefixes:
        for ratio in ratios:
            response = max(2, round(prefix / ratio))
            cells = [_cell(shape, prefix, response, count) for count in generations]
            lines.append(f"| {prefix:,} | {ratio:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(shape: LanguageShape, prefix: int, response: int, count: int) -> str:
    repeated, shared = gain(shape, prefix, [response] * count)
    return f"{repeated[0] / shared[0]:.2f}x, {repeated[1] / GIB:.1f} → {shared[1] / GIB:.1f} GiB"


def gain(shape: LanguageShape, prefix: int, lengths: Sequence[int]) -> tuple[tuple[float, float], tuple[float, float]]:
    """(operations, activation bytes) of one step with the prefix repeated, and with it shared."""
    repeated, shared = repeated_work(prefix, lengths), shared_work(prefix, lengths)
    chunk_rows = min(shared.held_logit_rows, CHUNK_BYTES // (4 * shape.vocab))
    return (
        (step_flops(shape, repeated, True), activation_bytes(shape, repeated, True, BF16_BYTES, chunk_rows)),
        (step_flops(shape, shared, True), activation_bytes(shape, shared, True, BF16_BYTES, chunk_rows, True)),
    )
