"""What is shown and asked at a point: frames and their size, and the words of a question. Numbers and text alone."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.bench.shapes import MERGED_PATCHES

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
