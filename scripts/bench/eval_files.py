"""A point of evaluation: its clips and records, rendered and encoded by the measurement, and a processor for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.bench.case import SPECIAL_IDS
from vlm_pg.bench.work import Point
from vlm_pg.errors import ConfigError

# Of Qwen2.5-VL's tower: numbers of a patch (14 x 14 pixels, two frames, three colours), patches of a window, and
# patches that become one visual token.
PATCH_PIXELS, WINDOW_PATCHES, MERGED_PATCHES = 2 * 3 * 14 * 14, 64, 4


@dataclass(frozen=True)
class EvalPoint(Point):
    """V videos of about P visual tokens, Q questions on each of them, G answers of exactly N tokens to each.

    Raises:
        ConfigError: fewer than 16 visual tokens, a number below 1, or fewer than 2 new tokens.
    """

    new_tokens: int
    questions: int = 1
    videos: int = 1

    def __post_init__(self) -> None:
        counts = (self.generations, self.questions, self.videos)
        if self.prefix < 16 or min(counts) < 1 or self.new_tokens < 2:
            raise ConfigError(
                f"A point got {self.videos} videos of {self.prefix} visual tokens, {self.questions} questions on each "
                f"and {self.generations} answers of {self.new_tokens} tokens; it needs at least 1 of each, 16 visual "
                "tokens (4 frames) and answers of at least 2 tokens. Choose other numbers."
            )

    @property
    def asked(self) -> int:
        """V x Q questions."""
        return self.videos * self.questions

    def __str__(self) -> str:
        each = "1 question on each of" if self.questions == 1 else f"{self.questions} questions on each of"
        videos = f"{each} {self.videos} video(s) of {self.prefix:,} visual tokens"
        return f"{videos}, {self.generations} answers of {self.new_tokens:,} tok"


@dataclass(frozen=True)
class TowerShape:
    """One vision tower of Qwen2.5-VL's kind: two frames of 14 x 14 pixels a patch, 2 x 2 patches a visual token.

    ``whole_frame_layers``: those in which a patch attends to its whole frame; in the others to a window of 8 x 8.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    whole_frame_layers: tuple[int, ...]

    @property
    def config(self) -> dict[str, Any]:
        """transformers' values."""
        return {
            "depth": self.layers,
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "intermediate_size": self.intermediate,
            "fullatt_block_indexes": list(self.whole_frame_layers),
        }


# Published ones, and for the first two as small in proportion as the 7B's.
_PUBLISHED_TOWER = TowerShape(1280, 32, 16, 3420, (7, 15, 23, 31))
TOWERS: dict[str, TowerShape] = {
    "small": TowerShape(80, 2, 2, 216, (1,)),
    "mid": TowerShape(160, 4, 2, 428, (3,)),
    "3b": _PUBLISHED_TOWER,
    "7b": _PUBLISHED_TOWER,
    "8b": _PUBLISHED_TOWER,
}

# Clips as they are stored, and what is shown of them: every fifth frame.
STORED_WIDTH, STORED_HEIGHT, STORED_RATE, SHOWN_RATE = 640, 360, 10, 2
# Pixels along a side of a visual token, and frames that it is made of.
TOKEN_SIDE, TOKEN_FRAMES = 28, 2
# A third of qwen-vl-utils' limit: a usual size of a frame where many share a prompt.
MOST_FRAME_TOKENS = 256
FEWEST_FRAMES = 4

OPTIONS = ("A. north", "B. south", "C. east", "D. west")
INSTRUCTION = "Answer with the letter of the right option."
# Of one token each around the words: <|im_start|>, <|vision_start|>; <|vision_end|>, <|im_end|>, <|im_start|>.
_HEAD, _TAIL = "user\n", "\nassistant\n"


@dataclass(frozen=True)
class Shown:
    """Of a video of about so many visual tokens: how many frames, and the largest area of one in pixels."""

    frames: int
    frame_pixels: int

    @classmethod
    def of(cls, visual_tokens: int) -> Shown:
        """As many frames as there are at the largest size, four at least."""
        fewest = FEWEST_FRAMES // TOKEN_FRAMES
        of_frame = min(MOST_FRAME_TOKENS, visual_tokens // fewest)
        return cls(TOKEN_FRAMES * max(fewest, round(visual_tokens / of_frame)), of_frame * TOKEN_SIDE**2)

    @property
    def stored_frames(self) -> int:
        """Length of the clip."""
        return self.frames * STORED_RATE // SHOWN_RATE

    @property
    def grid(self) -> tuple[int, int, int]:
        """Visual tokens along time, height and width, by qwen-vl-utils' own rule."""
        from vlm_pg.media.sampling import resized_size

        least = min(self.frame_pixels, 4 * TOKEN_SIDE**2)
        height, width = resized_size(STORED_HEIGHT, STORED_WIDTH, least, self.frame_pixels, TOKEN_SIDE)
        return self.frames // TOKEN_FRAMES, height // TOKEN_SIDE, width // TOKEN_SIDE

    @property
    def visual_tokens(self) -> int:
        """M, exactly."""
        time, height, width = self.grid
        return time * height * width

    @property
    def frame_patches(self) -> int:
        """Patches of two frames before the merger."""
        return self.visual_tokens // (self.frames // TOKEN_FRAMES) * MERGED_PATCHES


def question(number: int) -> str:
    """Questions of equal length, different from their beginning on."""
    return f"{number:04d}: where does the brightest field of the picture move to?"


def head_tokens() -> int:
    """Tokens of a prompt before its visual ones: a byte is one, and so is a control token."""
    return 2 + len(_HEAD)


def tail_tokens() -> int:
    """Tokens of a prompt behind its visual ones."""
    return 3 + len("\n".join((question(0), *OPTIONS, INSTRUCTION))) + len(_TAIL)


RECORDS = "records.jsonl"
_FIELD = 40


def write_files(folder: Path, point: EvalPoint) -> None:
    """Write records and clips below ``folder``: Q questions on each of V videos."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(point.videos):
        write_clip(folder / f"{number}.mp4", number, Shown.of(point.prefix).stored_frames)
    _write_records(folder / RECORDS, [number // point.questions for number in range(point.asked)])


def write_clip(path: Path, seed: int, frames: int) -> None:
    """A clip of coloured fields that move by a pixel or two a frame, H.264."""
    import av

    random = np.random.default_rng(seed)
    fields = random.integers(0, 256, (STORED_HEIGHT // _FIELD, STORED_WIDTH // _FIELD, 3), dtype=np.uint8)
    picture = fields.repeat(_FIELD, 0).repeat(_FIELD, 1)
    down, right = (int(step) for step in random.integers(1, 3, 2))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=STORED_RATE, options={"preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = STORED_WIDTH, STORED_HEIGHT, "yuv420p"
        for number in range(frames):
            moved = np.roll(picture, (down * number, right * number), (0, 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, "rgb24")))
        container.mux(stream.encode())


def _write_records(path: Path, videos: list[int]) -> None:
    records = (
        {
            "problem_id": number,
            "problem": question(number),
            "data_type": "video",
            "problem_type": "multiple choice",
            "options": list(OPTIONS),
            "solution": "<answer>A</answer>",
            "path": f"{video}.mp4",
            "data_source": "bench",
        }
        for number, video in enumerate(videos)
    )
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


_CONTROL_TOKENS = {
    # id, counted from the end of the vocabulary: those of `random_model`
    "<|im_end|>": 1,
    "<|im_start|>": 2,
    "<|vision_end|>": 3,
    "<|vision_start|>": 4,
    "<|video_pad|>": 5,
    "<|image_pad|>": 6,
    "<|endoftext|>": 7,
    "<|vision_pad|>": 8,
}
_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_processor(vocab_size: int) -> Any:
    """Every byte is a token; all other ids are words that no text is cut into, so that any answer can be read."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2_5_VLProcessor, Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"_{number}_" for number in range(len(letters), vocab_size - SPECIAL_IDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    unused = {f"<|unused_{number}|>": number for number in range(9, SPECIAL_IDS + 1)}
    control = {token: vocab_size - place for token, place in (_CONTROL_TOKENS | unused).items()}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary | control,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in control if token not in ("<|im_end|>", "<|endoftext|>")],
        padding_side="left",
        model_max_length=131072,
    )
    pixels = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        chat_template=_TEMPLATE,
    )
