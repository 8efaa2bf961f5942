"""Which prompts come next: those that share a beginning follow each other, so that it can be freed early."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vlm_pg.models.prompt_tree import PromptNode, PromptTree, prompt_tree
from vlm_pg.types import Prompt

# Finding what prompts share compares them in pairs.
COMPARED_TOGETHER = 128


class WaitingPrompts:
    """Prompts in the order in which they will be generated, and the nodes they pass through.

    ``nodes``: of all prompts; ``owner`` counts the prompts as they were given, and parents have smaller numbers.
    ``paths``: for each prompt its nodes from the beginning to its end. With ``share`` off that is one, its own.

    Args:
        check: raises for a prompt that cannot be generated from.
    """

    def __init__(self, prompts: Sequence[Prompt], share: bool = True, check: Callable[[Prompt], None] | None = None):
        if check is not None:
            for prompt in prompts:
                check(prompt)
        self.nodes: list[PromptNode] = []
        self.paths: list[tuple[int, ...]] = []
        order: list[int] = []
        for first in range(0, len(prompts), COMPARED_TOGETHER):
            tree = prompt_tree(prompts[first : first + COMPARED_TOGETHER], share)
            offset = len(self.nodes)
            self.nodes.extend(_renumbered(tree, first, offset))
            paths = [_path(tree, end, offset) for end in tree.end_nodes]
            self.paths.extend(paths)
            order.extend(first + i for i in _depth_first(paths))
        self._order = deque(order)
        self._readers = Counter(node for path in self.paths for node in path)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def take(self, count: int) -> list[int]:
        """The next ``count`` prompts wait no longer."""
        return [self._order.popleft() for _ in range(count)]

    def done(self, prompt: int) -> None:
        """All rollouts of this prompt are finished: it no longer needs its nodes."""
        self._readers.subtract(self.paths[prompt])

    def is_needed(self, node: int) -> bool:
        """Whether a prompt that waits or runs passes through this node."""
        return self._readers[node] > 0


def _renumbered(tree: PromptTree, first: int, offset: int) -> list[PromptNode]:
    return [
        replace(node, parent=node.parent + offset if node.parent >= 0 else -1, owner=node.owner + first)
        for node in tree.nodes
    ]


def _path(tree: PromptTree, end: int, offset: int) -> tuple[int, ...]:
    path: list[int] = []
    while end >= 0:
        path.append(end + offset)
        end = tree.nodes[end].parent
    return tuple(reversed(path))


def _depth_first(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """Prompts, those that pass through a node one after the other, in order of first appearance."""
    first_seen: dict[int, int] = {}
    for prompt, path in enumerate(paths):
        for node in path:
            first_seen.setdefault(node, prompt)
    return sorted(range(len(paths)), key=lambda prompt: [first_seen[node] for node in paths[prompt]])
