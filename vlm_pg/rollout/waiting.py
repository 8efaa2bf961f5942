"""Which prompts come next: those that share a beginning follow each other, so that it can be let go of early."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_pg.models.prompt_tree import PromptTree, prompt_tree
from vlm_pg.types import Prompt

# Finding what prompts share compares them in pairs.
COMPARED_TOGETHER = 128


@dataclass(frozen=True)
class Node:
    """Tokens ``start`` to ``stop`` (exclusive) of prompt ``owner`` and of all others that pass through this node.

    ``parent``: the node with the tokens before them, -1 at a prompt's beginning. Parents have smaller numbers.
    """

    parent: int
    owner: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class WaitingPrompts:
    """Prompts in the order in which they will be generated, and the nodes they pass through.

    ``paths``: for each prompt its nodes from the beginning to its end.
    """

    def __init__(self, prompts: Sequence[Prompt]):
        self.nodes: list[Node] = []
        self.paths: list[tuple[int, ...]] = []
        order: list[int] = []
        for first in range(0, len(prompts), COMPARED_TOGETHER):
            tree = prompt_tree(prompts[first : first + COMPARED_TOGETHER])
            offset = len(self.nodes)
            self.nodes.extend(_moved(tree, first, offset))
            paths = [_path(tree, end, offset) for end in tree.end_nodes]
            self.paths.extend(paths)
            order.extend(first + i for i in _depth_first(paths))
        self._order = deque(order)
        self._readers = Counter(node for path in self.paths for node in path)

    def __len__(self) -> int:
        return len(self._order)

    def peek(self) -> int:
        return self._order[0]

    def take(self) -> int:
        return self._order.popleft()

    def done(self, prompt: int) -> None:
        """All rollouts of this prompt are finished: it no longer needs its nodes."""
        self._readers.subtract(self.paths[prompt])

    def is_needed(self, node: int) -> bool:
        """Whether a prompt that waits or runs passes through this node."""
        return self._readers[node] > 0


def _moved(tree: PromptTree, first: int, offset: int) -> list[Node]:
    return [
        Node(node.parent + offset if node.parent >= 0 else -1, node.owner + first, node.start, node.stop)
        for node in tree.nodes
    ]


def _path(tree: PromptTree, end: int, offset: int) -> tuple[int, ...]:
    path: list[int] = []
    while end >= 0:
        path.append(end + offset)
        end = tree.nodes[end].parent
    return tuple(reversed(path))


def _depth_first(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """Prompts so that whoever passes through a node follows the others that do, in order of first appearance."""
    first_seen: dict[int, int] = {}
    for prompt, path in enumerate(paths):
        for node in path:
            first_seen.setdefault(node, prompt)
    return sorted(range(len(paths)), key=lambda prompt: [first_seen[node] for node in paths[prompt]])
