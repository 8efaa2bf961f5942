"""The command line of ``vlm-pg bench rollout``."""

from __future__ import annotations

import argparse

from vlm_pg.bench.generation.grid import GENERATIONS, GROUPS, NEW_TOKENS
from vlm_pg.bench.generation.work import GENERATION_DESCRIPTIONS, GENERATION_WORK
from vlm_pg.bench.options import add_budget_and_output_options, add_measurement_options

_WHAT = """\
Speed and peak memory of generating: B prompts of P tokens, G responses of N tokens to each. Every contestant decodes
greedily from the same random weights and the same random prompts (text tokens stand in for visual ones: past the vision
tower the language model treats them alike), and generates exactly N tokens a response. In fp32 the tokens of all
contestants are compared before anything is timed; a difference is an error that names the first position, unless a
plain forward finds the two tokens' logits tied there (up to 1e-4 apart). In bf16, where every contestant rounds
differently, the share of equal tokens is printed.
"""

_HOW = """\
how it is measured:
  decoding Greedy for everybody: only then can tokens be compared. Sampling would add the same work per token to all.
  time     One process per point. Each contestant generates once as a warm-up, then they run in turn (A B C, A B C, ...)
           --repeats times, each with one new token and with all N; medians are compared.
             tokens/s              new tokens of all responses over the time of the whole run, prefill included
             time to first token   the time of a run of one token (of all groups)
             decode time per token the rest of the whole run over N - 1: one more token for all responses
  memory   On a CPU, each contestant generates once in a forked process of its own that builds the model and warms up
           on a tiny point: peak resident memory (VmHWM, reset through /proc/self/clear_refs; where that is not allowed,
           ru_maxrss) above what was resident before. glibc is told to give freed memory back at once. On a GPU:
           torch.cuda.max_memory_allocated above memory_allocated before, during the warm-up. Both leave out the weights
           and include keys and values, whose own size is printed beside them.
  bounds   FLOPs: of prefill and decoding, weighed with the model's shape; prompt tokens: encoded before the first token
           (G x P a group where the prompt is repeated, P where it is shared); keys and values: (P + N - 1) x G a
           group against P + (N - 1) x G (the last token is never read). Decoding one token for few responses waits for
           memory more than for FLOPs, so tokens/s can go beyond their bound or stay far below.

examples:
  vlm-pg bench rollout --points 4096,8,64 4096,8,64,4 --model mid --threads 2
  vlm-pg bench rollout --budget-minutes 30 --model small --out rollout.json --figure rollout.svg
  vlm-pg bench rollout --prefix 4096 --generations 1 2 4 8 16 32 --new-tokens 64 --groups 1 --model mid
  vlm-pg bench rollout --prefix 4096 8192 --model 7b --dtype bf16
"""


def rollout_parser() -> argparse.ArgumentParser:
    """Options of ``vlm-pg bench rollout``."""
    kinds = "\n".join(f"  {name}: {text}" for name, text in GENERATION_DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="vlm-pg bench rollout",
        description=_WHAT,
        epilog=f"contestants:\n{kinds}\n\n{_HOW}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("points (default: the whole grid, informative points first)")
    what.add_argument(
        "--points", nargs="+", metavar="P,G,N[,B]", help="exactly these: prefix, responses, new tokens, groups (1)"
    )
    what.add_argument("--prefix", type=int, nargs="+", metavar="P", help="prefix lengths, tokens")
    what.add_argument(
        "--generations", type=int, nargs="+", default=GENERATIONS, metavar="G", help="responses per prompt"
    )
    what.add_argument("--new-tokens", type=int, nargs="+", default=NEW_TOKENS, metavar="N", help="tokens per response")
    what.add_argument(
        "--groups", type=int, nargs="+", default=GROUPS, metavar="B", help="prompts generated for at once"
    )
    add_measurement_options(parser, list(GENERATION_WORK), list(GENERATION_WORK))
    add_budget_and_output_options(parser, "--points or --prefix")
    return parser
