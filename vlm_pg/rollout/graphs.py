"""CUDA graphs of the decode step: recorded once for an arrangement of rollouts, replayed for every token.

A decode step is some thousand small kernels, and the host takes longer to launch them than the device to run them. A
recorded step is launched at once. It reads and writes the addresses it was recorded with, so everything that changes
from token to token lies in tensors that stay where they are, and a step of other shapes or tensors is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vlm_pg.attention.registration import AttentionContext
from vlm_pg.models.liger import liger_of
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.fused.choice import fused_step
from vlm_pg.rollout.linear_step import rule_of
from vlm_pg.rollout.merged import adapter_line
from vlm_pg.rollout.settings import RolloutSettings

# Recording costs about as much as a few steps. Room for own tokens and the longest response say how many may follow.
LEAST_REPLAYS = 16


@dataclass
class GraphUse:
    """Whether one ``generate`` call records its steps (``off_because``: why not), and counts: each step is a replay,
    the first one of a capture, or an eager one.

    ``linear_rule``: name of the ``DeltaRule`` of a ragged batch. ``fused``: on CUDA, name of the ``FusedStep``.
    """

    off_because: str | None = None
    captures: int = 0
    replays: int = 0
    eager_steps: int = 0
    linear_rule: str | None = None
    fused: str | None = None

    @classmethod
    def of(cls, policy: Policy, settings: RolloutSettings, divided: bool = False) -> GraphUse:
        return cls(_off_because(policy, settings, divided))


def decoding_line(policy: Policy, settings: RolloutSettings) -> str:
    """How rollouts will be decoded on this device, in one sentence for the user."""
    off_because = _off_because(policy, settings, divided=False)
    line = f"decoding: {f'no CUDA graphs: {off_because}' if off_because else 'steps are replayed from CUDA graphs'}"
    if policy.device.type == "cuda":
        line += f"; its small operations: {fused_step(policy, settings).name}"
        if policy.family.linear_attention:
            line += f"; states of linear-attention layers: {rule_of(policy).name}"
        if adapter := adapter_line(policy, settings):
            line += f"; adapter: {adapter}"
    return line


def _off_because(policy: Policy, settings: RolloutSettings, divided: bool) -> str | None:
    if divided:
        return "processes send each other queries in every layer, for each has a part of the prompts"
    if not settings.cuda_graphs:
        return "rollout.cuda_graphs is false"
    if policy.device.type != "cuda":
        return f"the model is on {policy.device.type}"
    if policy.lockstep is not None:
        return "ranks run in lockstep through scattered weights"
    if is_sharded(policy.model):
        return "hooks of ZeRO-3 run in every layer"
    return experts_wait(policy) if policy.family.moe else None


# torch's grouped matrix product reads the offsets of the experts on the device for bf16 on these major capabilities;
# elsewhere it copies them to the host and loops (GroupedBlas.cpp and GroupedMMUtils.h of torch 2.11 to 2.15).
_GROUPED_MAJORS = (9, 10)


def experts_wait(policy: Policy) -> str | None:
    """Why the host waits for the device in a mixture's layers on CUDA, as end of a sentence; None: it does not.

    A CUDA graph cannot hold such a wait. Of transformers' implementations "grouped_mm", its default, and "batched_mm"
    have shapes that depend on the number of rows alone; "eager" loops over the experts that were hit (``nonzero``).
    """
    implementation = getattr(policy.model.config.get_text_config(), "_experts_implementation", None) or "eager"
    if torch.version.hip is not None and implementation == "grouped_mm":
        return "torch's grouped matrix product may copy the experts' offsets to the host on ROCm"
    if "experts" in liger_of(policy.model).parts:
        return "liger-kernel's experts are not known to leave the host alone (model.liger)"
    if implementation == "batched_mm":
        return None
    if implementation != "grouped_mm":
        return f"the experts' implementation {implementation!r} of transformers may ask which of them were hit"
    major, minor = torch.cuda.get_device_capability(policy.device)
    if policy.dtype != torch.bfloat16 or major not in _GROUPED_MAJORS:
        dtype = str(policy.dtype).removeprefix("torch.")
        return (
            f"torch's grouped matrix product copies the experts' offsets to the host in {dtype} at compute capability "
            f"{major}.{minor}; it does not in bfloat16 at 9.x and 10.x"
        )
    return None


class GraphMemory:
    """One memory pool for the intermediate results of all recorded steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run ``work`` once and record it; returns a function that replays it on the same tensors.

        Recording computes nothing, so in-place changes of ``work`` have happened once when this returns.

        Raises:
            RuntimeError: something in it cannot be recorded, for example because the host waits for a result.
        """
        # Permanent allocations of a first run (workspaces of libraries) must not be in the pool.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the device.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause, _, advice = str(error).partition("\n")
            message = f"A decode step could not be recorded as a CUDA graph: {cause}. Set rollout.cuda_graphs=false."
            raise RuntimeError(f"{message}\n{advice}".rstrip()) from error
        return graph.replay


class DecodeGraph:
    """The decode step of one arrangement: recorded when it is first taken, where enough steps may follow.

    Owns the tensors that a recorded step reads and writes: tokens, positions, hidden states. Those of the context
    (keys, values, lengths) must stay where they are, too.

    Args:
        rows: rows of the step.
        memory: None runs every step eagerly.
        use: counts the steps of the present ``generate`` call.
        layers: context that the model's layers run in.
    """

    def __init__(
        self,
        policy: Policy,
        context: AttentionContext,
        rows: int,
        memory: GraphMemory | None,
        use: GraphUse,
        layers: AbstractContextManager[None] | None = None,
    ):
        self._policy, self._context, self._memory, self.use = policy, context, memory, use
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=policy.device)
        self._positions = torch.zeros_like(self._tokens)
        self._hidden: torch.Tensor | None = None
        self._layers = nullcontext() if layers is None else layers
        self._replay: Callable[[], None] | None = None

    def step(self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, steps_left: int) -> torch.Tensor:
        """Hidden states [n, D] of new tokens, int64 [n] like their positions and the rows they belong to.

        ``steps_left``: this one and those that may follow in this arrangement.
        """
        self._tokens[rows], self._positions[rows] = tokens, positions
        if self._replay is not None:
            self._replay()
            self.use.replays += 1
        elif self._memory is not None and steps_left > LEAST_REPLAYS:
            self._replay = self._memory.capture(self._forward)
            self.use.captures += 1
        else:
            self._forward()
            self.use.eager_steps += 1
        assert self._hidden is not None
        return self._hidden[rows]

    def _forward(self) -> None:
        with self._layers:
            hidden = self._policy.hidden_states(self._tokens, self._positions.expand(3, -1), self._context)
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden.copy_(hidden)
