"""The clips of the embedded set: a shape flashes four colours, each once, in some order.

Pure functions from a clip's key to its pixels, so that any clip can be drawn again, alone, on any process.
A clip has 8 frames of 56x56, two frames a colour: two frames are one temporal patch of Qwen2.5-VL, so a model sees
one patch per colour, and no single patch tells the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import av
import numpy as np

Order = tuple[str, ...]

COLOURS: Order = ("red", "green", "blue", "yellow", "white")
COLOURS_PER_CLIP = 4
POSITIONS: tuple[str, ...] = ("first", "second", "third", "last")
FRAMES_PER_COLOUR = 2
FRAME_SIDE = 56
FRAMES_PER_SECOND = 2
# Part of a prepared folder's identity: raise it when the pixels or the questions of a clip change.
RENDER_VERSION = 1

_RGB = {
    "red": (205, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 70, 210),
    "yellow": (225, 205, 45),
    "white": (237, 237, 237),
}
_SHAPES = ("square", "disc", "diamond", "cross", "ring")

ALL_ORDERS: tuple[Order, ...] = tuple(permutations(COLOURS, COLOURS_PER_CLIP))


def _held_out_orders() -> tuple[Order, ...]:
    """For every choice of four colours one order and its rotations.

    Whole rotations, so that among the held-out orders and among the others every colour is equally often first, second,
    third and last: nothing can be guessed from how often a colour stands where. A different order for each choice, so
    that which colour follows which does not tell held-out orders from the others either.
    """
    held_out: list[Order] = []
    for number, (first, *others) in enumerate(combinations(COLOURS, COLOURS_PER_CLIP)):
        ways = list(permutations(others))
        order = (first, *ways[number % len(ways)])
        held_out += [order[shift:] + order[:shift] for shift in range(COLOURS_PER_CLIP)]
    return tuple(held_out)


UNSEEN_ORDERS: tuple[Order, ...] = _held_out_orders()
SEEN_ORDERS: tuple[Order, ...] = tuple(order for order in ALL_ORDERS if order not in UNSEEN_ORDERS)


@dataclass(frozen=True)
class Clip:
    """One clip and its question.

    ``key``: the integers that seed everything random about the pixels.
    ``order``: the colours in the order shown. ``position``: the one in question. ``options``: colours in the order
    offered (A, B, C, D).

        Clip((0, 1, 17), ("red", "blue", "green", "yellow"), "last", ("blue", "yellow", "red", "green"))
    """

    key: tuple[int, ...]
    order: Order
    position: str
    options: Order

    @property
    def answer(self) -> str:
        """The letter of the option that answers the question."""
        return "ABCD"[self.options.index(self.order[POSITIONS.index(self.position)])]


def make_clips(count: int, orders: tuple[Order, ...], positions: tuple[str, ...], key: tuple[int, ...]) -> list[Clip]:
    """``count`` clips whose orders, positions in question and correct letters are each used equally often.

    ``key``: integers (seed, split) that the draw depends on; clip i has the key ``(*key, i)``.
    """
    rng = np.random.default_rng([*key, 0])
    cells = [(order, position, letter) for order in orders for position in positions for letter in range(4)]
    clips = []
    for index in range(count):
        if index % len(cells) == 0:
            rng.shuffle(cells)
        order, position, letter = cells[index % len(cells)]
        order = tuple(str(colour) for colour in order)
        answer = order[POSITIONS.index(str(position))]
        others = [colour for colour in order if colour != answer]
        options = [others[i] for i in rng.permutation(len(others))]
        options.insert(int(letter), answer)
        clips.append(Clip((*key, index), order, str(position), tuple(options)))
    return clips


def draw(clip: Clip) -> np.ndarray:
    """The pixels of a clip: uint8 [8, 56, 56, 3]. Place, size, shape, shade, background and noise vary by clip."""
    rng = np.random.default_rng([*clip.key, 1])
    mask = _shape_mask(rng)[..., None]
    background = rng.uniform(60, 190) + rng.uniform(-12, 12, size=3)
    noise_level = rng.uniform(2, 12)
    frames = np.empty((len(clip.order) * FRAMES_PER_COLOUR, FRAME_SIDE, FRAME_SIDE, 3), dtype=np.uint8)
    for index, colour in enumerate(clip.order):
        shade = np.asarray(_RGB[colour]) + rng.uniform(-18, 18, size=3)
        for repeat in range(FRAMES_PER_COLOUR):
            picture = np.where(mask, shade, background) + rng.normal(0, noise_level, (FRAME_SIDE, FRAME_SIDE, 1))
            frames[index * FRAMES_PER_COLOUR + repeat] = picture.clip(0, 255).round()
    return frames


def _shape_mask(rng: np.random.Generator) -> np.ndarray:
    """bool [56, 56]: where the shape lies. Radius 9 to 15 pixels, wholly inside the frame."""
    shape = _SHAPES[rng.integers(len(_SHAPES))]
    radius = rng.uniform(9, 15)
    centre_y, centre_x = rng.uniform(radius, FRAME_SIDE - radius, size=2)
    grid_y, grid_x = np.mgrid[:FRAME_SIDE, :FRAME_SIDE] + 0.5
    away_y, away_x = np.abs(grid_y - centre_y), np.abs(grid_x - centre_x)
    if shape == "square":
        return np.maximum(away_y, away_x) <= radius * 0.9
    if shape == "diamond":
        return away_y + away_x <= radius * 1.25
    if shape == "cross":
        return (np.minimum(away_y, away_x) <= radius * 0.4) & (np.maximum(away_y, away_x) <= radius)
    distance = np.hypot(away_y, away_x)
    if shape == "ring":
        return (distance <= radius) & (distance >= radius * 0.4)
    return distance <= radius


def encode_mp4(frames: np.ndarray, path: Path) -> None:
    """Write uint8 [F, height, width, 3] as H.264 mp4 at 2 frames a second.

    No B-frames: presentation order is coding order, so the file needs no edit list and every decoder agrees on times.
    """
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20", "preset": "ultrafast", "bf": "0", "threads": "1"}
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
