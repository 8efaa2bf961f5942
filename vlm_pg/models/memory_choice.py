"""``auto`` in ``ModelSettings``: nothing is offloaded or tiled that fits without; else as little as fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from vlm_pg.memory import GIB
from vlm_pg.models.memory_sizes import LanguageSizes, TowerSizes
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice

# Of what is free; the rest is for what estimates leave out and for gaps between tensors.
USABLE = 0.8
TILE_ROWS = 4096
# Below this a piece of the tower is too little for a GPU at a time.
LEAST_PIECE_TOKENS = 1024


@dataclass(frozen=True)
class Need:
    """Sizes and free memory at a run's start.

    Attributes:
        rows: tokens of the longest stream (``training.micro_batch_tokens``).
        media_tokens: visual tokens of the largest call of the tower.
        free: bytes that activations may take.
        device: as the user sees it.
    """

    language: LanguageSizes
    tower: TowerSizes | None
    rows: int
    media_tokens: int
    free: int
    device: str

    @property
    def usable(self) -> int:
        return int(USABLE * self.free)


class Decision(NamedTuple):
    """``line``: the choice and its reason, for the user. ``fits``: whether the estimate is within bounds. ``left``:
    usable bytes beside the longest stream and the media."""

    choice: MemoryChoice
    line: str
    fits: bool
    left: int


def decide(settings: ModelSettings, need: Need) -> Decision:
    """``settings``, with ``auto`` resolved: tiles first, which cost least, then offloaded layer inputs, then prefix
    states; pieces of the tower independently, since it runs when no stream does."""
    as_set = MemoryChoice.of(settings)
    checkpointing = settings.gradient_checkpointing

    def stream(choice: MemoryChoice) -> int:
        return need.language.stream(need.rows, choice, checkpointing)

    chosen = as_set
    for chosen in _by_cost(as_set, settings):
        if stream(chosen) <= need.usable:
            break
    taken = stream(chosen)
    if need.tower is not None:
        chosen = replace(chosen, vision_piece_tokens=_piece_tokens(settings, need))
        taken = max(taken, _media(chosen, settings, need))
    fits = taken <= need.usable
    return Decision(chosen, _line(chosen, as_set, settings, need, fits), fits, max(0, need.usable - taken))


def smallest(settings: ModelSettings) -> MemoryChoice:
    """The choice with the least memory that ``settings`` allow: what does not fit with it does not fit."""
    *_, choice = _by_cost(MemoryChoice.of(settings), settings)
    if settings.vision_piece_tokens == "auto":
        choice = replace(choice, vision_piece_tokens=LEAST_PIECE_TOKENS)
    return choice


def _by_cost(as_set: MemoryChoice, settings: ModelSettings) -> Iterator[MemoryChoice]:
    """The settings, then cumulatively each measure that they leave to choose."""
    yield as_set
    choice = as_set
    if settings.mlp_tile_rows == "auto":
        choice = replace(choice, mlp_tile_rows=TILE_ROWS)
        yield choice
    for name in ("offload_layer_inputs", "offload_prefix_states"):
        # Without recomputation every layer keeps all it computes, so offloading its input saves nothing.
        if getattr(settings, name) == "auto" and settings.gradient_checkpointing:
            choice = replace(choice, **{name: True})
            yield choice


def _piece_tokens(settings: ModelSettings, need: Need) -> int:
    if settings.vision_piece_tokens != "auto":
        return settings.vision_piece_tokens
    if _media(MemoryChoice(), settings, need) <= need.usable:
        return 0
    tokens = LEAST_PIECE_TOKENS
    # As large as half of the usable memory allows: larger pieces are no faster, and sizes are estimates.
    while tokens * 2 < need.media_tokens:
        if _media(MemoryChoice(vision_piece_tokens=tokens * 2), settings, need) > need.usable // 2:
            break
        tokens *= 2
    return tokens


def _media(choice: MemoryChoice, settings: ModelSettings, need: Need) -> int:
    assert need.tower is not None
    return need.tower.media(need.media_tokens, choice, settings.train, settings.gradient_checkpointing)


def _line(choice: MemoryChoice, as_set: MemoryChoice, settings: ModelSettings, need: Need, fits: bool) -> str:
    checkpointing = settings.gradient_checkpointing
    before, after = (need.language.stream(need.rows, c, checkpointing) for c in (MemoryChoice(), choice))
    words = (
        f"memory: {_gib(need.free)} free on {need.device}; a stream of {need.rows:,} tokens needs about {_gib(before)}"
    )
    if need.tower is not None:
        whole = _media(MemoryChoice(), settings, need)
        words += f", media of {need.media_tokens:,} visual tokens {_gib(whole)}"
    measures = {
        "offload_layer_inputs": "layer inputs offloaded",
        "offload_prefix_states": "keys and values of prefixes offloaded",
        "mlp_tile_rows": f"MLPs in tiles of {choice.mlp_tile_rows:,} rows",
        "vision_piece_tokens": f"vision tower in pieces of {choice.vision_piece_tokens:,} tokens",
    }
    taken = [
        f"{measure} ({'as set' if getattr(as_set, name) else 'auto'})"
        for name, measure in measures.items()
        if getattr(choice, name)
    ]
    if offloaded := need.language.offloaded(need.rows, choice):
        taken.append(f"{_gib(offloaded)} offloaded")
    words += f": {', '.join(taken)}" if taken else ": nothing is offloaded or split"
    if after < before:
        words += f"; the stream then needs {_gib(after)}"
    if not fits:
        first = "" if checkpointing else "set model.gradient_checkpointing=true, or "
        words += f". That may not fit: {first}lower training.micro_batch_tokens"
    return words


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
