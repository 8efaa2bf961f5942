"""The DeepSpeed engine: ZeRO stages over the same policy; and a comparison, in a run's first updates, of the gradient
that the optimizer took with the computed one, for every weight.

An engine that reduces, shards and offloads gradients can lose some of them, or add stale ones, without an error. So for
each trained weight the gradient of every backward is projected on a fixed vector as it arrives, over all ranks; after
the update the same projection is derived from Adam's first moment: (m_t - beta_1 m_{t-1}) / (1 - beta_1) is the
gradient after clipping.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch

from vlm_pg.distributed import RankLayout, join_ranks, max_over_ranks, sum_over_ranks
from vlm_pg.errors import GradientMismatchError
from vlm_pg.memory import free_bytes
from vlm_pg.models.policy import Policy
from vlm_pg.models.sharded_weights import save_sharded
from vlm_pg.models.weights import is_on_nvme, not_finite, whole_shape
from vlm_pg.training.deepspeed_config import make_optimizer, offloads_optimizer, read_deepspeed_config
from vlm_pg.training.engines import SHARD_BYTES, Engine, check_finite, check_updated, keeps_masters, trained_weights
from vlm_pg.training.optimizer_states import OptimizerStates, StateSlice, adam_state
from vlm_pg.training.settings import TrainingSettings

# Of free memory, for gathering all weights for generation: keys and values need room too.
SHARE_FOR_WEIGHTS = 0.5


def connect() -> None:
    """Join the processes that the launcher started: NCCL with GPUs, gloo without."""
    import deepspeed

    if "RANK" not in os.environ:
        # Without a launcher: a world of one.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in single.items()})
    join_ranks()  # DeepSpeed reuses the connection
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # DeepSpeed would compile a C++ extension for shared-memory collectives at first start, which takes minutes and
        # a compiler; gloo needs neither.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)


@contextmanager
def sharded_loading(settings: TrainingSettings, dtype: torch.dtype) -> Iterator[None]:
    """Around ``from_pretrained``: under ZeRO-3 each weight is sharded as soon as it is read.

    No rank ever holds the whole model. Rank 0 reads the files, which are memory-mapped.
    """
    config = _engine_config(settings, dtype)
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    strong_reference = HfDeepSpeedConfig(config)  # transformers has a weak one
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del strong_reference


def _engine_config(settings: TrainingSettings, dtype: torch.dtype) -> dict[str, Any]:
    config = read_deepspeed_config(settings)
    if dtype == torch.bfloat16:
        # Sums over micro-batches and ranks are kept in fp32: bf16 has 8 bits of mantissa.
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config["communication_data_type"] = "fp32"
    return config


def _matrices_first(named: Sequence[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
    """Of each module the weights of its layers before their biases: q, k and v are neighbours in ZeRO's flat buffer, so
    a decode step multiplies with them at once."""
    of_modules = groupby(named, key=lambda pair: pair[0].rsplit(".", 2)[0])
    return [pair for _, group in of_modules for pair in sorted(group, key=lambda pair: pair[1].dim() < 2)]


class DeepSpeedEngine(Engine):
    """Wraps the policy in a DeepSpeed engine; every rank makes the same number of backward calls.

    ZeRO requires backward calls that reach every trained weight. A weight outside the last one is not reduced over
    ranks (stage 1) or not copied to offloaded states; one outside the first is added to leftovers of the update before.
    So the first and the last backward of an update reach all (``needs_every_weight``).
    """

    needs_every_weight = True

    def __init__(
        self,
        policy: Policy,
        settings: TrainingSettings,
        ranks: RankLayout,
        gather: Literal["auto", "all", "layers"] = "auto",
    ):
        import deepspeed

        super().__init__(policy, settings, ranks)
        config = _engine_config(settings, policy.dtype)
        self._stage = config.get("zero_optimization", {}).get("stage", 0)
        named = trained_weights(policy)
        names, parameters = zip(*(named if self._stage == 3 else _matrices_first(named)), strict=True)
        optimizer = make_optimizer(self.rates.groups(parameters, names), settings, config, policy.device)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=optimizer, model_parameters=parameters, config=config
        )
        self.module = self._engine
        # DeepSpeed averages gradients over ranks, sequence ranks included; the loss weights already make them a sum.
        self.loss_scale = float(ranks.world_size)
        self._states_linked = False
        self._max_grad_norm = settings.max_grad_norm
        where = "offloaded" if offloads_optimizer(config) else "on the device"
        self.description = f"deepspeed (ZeRO-{self._stage}, {type(optimizer).__name__}, optimizer states {where})"
        self._trained = dict(trained_weights(policy))
        self._guard = GradientGuard(
            self._trained, _first_moment, settings.betas[0], self.loss_scale, settings.checked_updates
        )
        self.gathers_all = self._stage < 3 or gather == "all" or (gather == "auto" and self._weights_fit())

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.loss_scale)

    def step(self, learning_rate: float) -> float:
        self.rates.set(self._engine.optimizer.param_groups, learning_rate)
        self._engine.step()
        if not self._states_linked and self._stage in (1, 2):
            # DeepSpeed links weights to their states once the first of its parameter groups has some, for all groups.
            link_states(self._engine.optimizer)
        self._states_linked = True
        # DeepSpeed leaves the weights unchanged when the norm is not finite, and reports it.
        norm = float(self._engine.get_global_grad_norm())
        check_finite(norm)
        check_updated(self.policy, not_finite(self._trained.items()))
        self.policy.weights_changed()
        self._guard.after_step(norm, self._max_grad_norm)
        return norm

    @property
    def states(self) -> OptimizerStates:
        states = Zero3States if self._stage == 3 else FlatStates
        return states(self._engine, self._trained, keeps_masters(self.policy, self._trained.values()))

    def _states_loaded(self, updates: int) -> None:
        if updates:
            self._guard.skip_first()

    def save_weights(self, folder: Path) -> None:
        if self._stage < 3:
            super().save_weights(folder)
        else:
            save_sharded(self.policy.model, folder, _gathered, self.ranks.is_rank0, SHARD_BYTES)

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        if self._stage < 3:
            yield
        elif self.gathers_all:
            with (
                _gathered(self.policy.parameters()),
                self._without_hooks(),
                self.policy.independent_ranks(scattered=False),
            ):
                yield
        else:
            with self.policy.independent_ranks(scattered=True):
                yield

    def _weights_fit(self) -> bool:
        """Whether every rank has room for all weights beside its shard."""
        size = sum(cast("Any", p).ds_numel * p.element_size() for p in self.policy.parameters())
        lacking = {"ranks": float(size > SHARE_FOR_WEIGHTS * free_bytes(self.policy.device))}
        return max_over_ranks(lacking, self.policy.device)["ranks"] == 0

    @contextmanager
    def gathered(self, weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        with _gathered(weights) if self._stage == 3 else nullcontext():
            yield

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        with self.gathered(self.policy.parameters()):
            yield

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """ZeRO-3's module hooks would release gathered weights after each module."""
        offload = self._engine.optimizer.parameter_offload
        for parameter in self.policy.parameters():
            cast("Any", parameter).ds_active_sub_modules.clear()
        offload._remove_module_hooks()
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()


@contextmanager
def _gathered(weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """ZeRO-3: every rank holds these weights whole inside. A collective.

    DeepSpeed reads weights on NVMe through a few buffers (``offload_param.buffer_count``), and holds one for each
    gathered weight. So these are gathered one after the other, and release their buffer.
    """
    import deepspeed

    weights = list(weights)
    with ExitStack() as stack:
        for weight in filter(is_on_nvme, weights):
            stack.enter_context(deepspeed.zero.GatheredParameters([weight]))
            cast("Any", weight).nvme_swapper.remove_partition_and_release_buffers([weight])
        stack.enter_context(deepspeed.zero.GatheredParameters([weight for weight in weights if not is_on_nvme(weight)]))
        yield


def _first_moment(parameter: torch.nn.Parameter) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    return cast(torch.Tensor, safe_get_full_optimizer_state(parameter, "exp_avg"))


class _DeepSpeedStates(OptimizerStates):
    def __init__(self, engine: Any, trained: Mapping[str, torch.nn.Parameter], masters: bool):
        self._engine, self._zero, self._trained, self.masters = engine, engine.optimizer, trained, masters
        self.shapes = {name: whole_shape(weight) for name, weight in trained.items()}
        # DeepSpeed's AdamW for CPUs counts with ints.
        self._whole_steps = not isinstance(self._adam, torch.optim.AdamW)

    @property
    def _adam(self) -> Any:
        return self._zero.optimizer

    @property
    def updates(self) -> int:
        states = [self._adam.state.get(flat, {}) for flat in self._flats()]
        return max((int(state.get("step", 0)) for state in states), default=0)

    def slices(self) -> Iterator[StateSlice]:
        return self._pieces(self.updates, fill=False)

    def blank(self, updates: int) -> Iterator[StateSlice]:
        self._engine.global_steps = updates
        self._engine.global_samples = updates * self._engine.train_batch_size()
        return self._pieces(updates, fill=True)

    def _flats(self) -> list[torch.Tensor]:
        """This rank's fp32 weights in the optimizer: flat, many weights in one tensor."""
        raise NotImplementedError

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        raise NotImplementedError

    def _begin(self, flat: torch.Tensor, updates: int) -> None:
        if updates:
            self._adam.state[flat] = adam_state(flat, updates, self._whole_steps)


class FlatStates(_DeepSpeedStates):
    """Stages 1 and 2."""

    def _flats(self) -> list[torch.Tensor]:
        # Of its optimizer for stage 1 in bf16, and of its optimizer for all else.
        of_bf16 = getattr(self._zero, "fp32_groups_flat_partition", None)
        return self._zero.single_partition_of_fp32_groups if of_bf16 is None else of_bf16

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        if fill:
            for flat in self._flats():
                self._begin(flat, updates)
            if updates:
                link_states(self._zero)
        for name, weight in self._trained.items():
            mapping = weight._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            for kind in self.kinds(updates):
                part = mapping.get_hp_fragment(None if kind == "master" else kind)
                yield StateSlice(name, kind, mapping.lp_fragment_address.start, part.detach())


def link_states(zero: Any) -> None:
    """Stages 1 and 2: link weights to their states, as DeepSpeed does after its first step."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


class Zero3States(_DeepSpeedStates):
    """Stage 3, states in memory or on NVMe, fetched one group of weights at a time."""

    def _flats(self) -> list[torch.Tensor]:
        return self._zero.fp32_partitioned_groups_flat

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        names = {id(weight): name for name, weight in self._trained.items()}
        for group, (flat, weights) in enumerate(zip(self._flats(), self._zero.fp16_groups, strict=True)):
            on_nvme = self._zero._swappable_optimizer_subgroup(group)
            if on_nvme:
                self._zero._optimizer_states_and_gradient_swap_in(group)
            if fill:
                self._begin(flat, updates)
            for weight in weights:
                yield from self._slices_of(names[id(weight)], weight, flat, updates)
            if on_nvme and fill:
                self._zero._optimizer_states_and_gradient_swap_out(group)
            elif on_nvme:
                self._zero._release_swap_buffers(group)

    def _slices_of(self, name: str, weight: Any, flat: torch.Tensor, updates: int) -> Iterator[StateSlice]:
        _, offset, size = self._zero.grad_position[self._zero.get_param_id(weight)]
        first = self._zero._get_param_partition_rank(weight) * size
        # The last ranks' parts end in padding, or are nothing else.
        count = min(size, weight.ds_numel - first)
        for kind in self.kinds(updates) if count > 0 else ():
            state = flat.detach() if kind == "master" else self._adam.state[flat][kind]
            yield StateSlice(name, kind, first, state[offset : offset + count])


# Relative to the norm of the sum: a lost, doubled or stale part is of its order.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
# Rounding of the first moment itself, relative to its norm.
MOMENT_TOLERANCE = 1e-5


class GradientGuard:
    """Watches some updates, then removes its hooks.

    Args:
        weights: name -> trained weight.
        first_moment: fp32 first moment of a weight, whole, on every rank. A collective.
        beta: Adam's first beta.
        loss_scale: factor of the losses, divided out by the engine.
        updates: number of updates to watch.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        first_moment: Callable[[torch.nn.Parameter], torch.Tensor],
        beta: float,
        loss_scale: float,
        updates: int,
    ):
        self._weights, self._first_moment = weights, first_moment
        self._beta, self._loss_scale, self._left = beta, loss_scale, updates
        self._computed: dict[str, torch.Tensor] = {}
        # Of each weight's first moment what ``_projection`` gives.
        self._before: Mapping[str, Sequence[float]] | None = dict.fromkeys(weights, (0.0, 0.0))
        self._hooks = [
            weight.register_hook(partial(self._seen, name)) for name, weight in weights.items() if updates > 0
        ]

    def skip_first(self) -> None:
        """After a resume, moments are not zero: the first update only reads them."""
        self._before = None

    def after_step(self, grad_norm: float, max_grad_norm: float) -> None:
        """Call after the optimizer's step, on all ranks.

        Raises:
            GradientMismatchError: the optimizer took another gradient. The weights are changed.
        """
        if not self._left:
            return
        wrong = self._compared(grad_norm, max_grad_norm)
        self._left -= 1
        if not self._left:
            for hook in self._hooks:
                hook.remove()
        if wrong:
            numbers = [f"{name} (computed {computed:.4g}, taken {taken:.4g})" for name, computed, taken in wrong[:4]]
            raise GradientMismatchError(
                f"DeepSpeed updated {len(wrong)} of {len(self._weights)} weights with another gradient than training "
                f"computed: {'; '.join(numbers)}. Numbers are projections on a fixed vector. The last update is wrong "
                "and no checkpoint of it is written. Take options out of training.deepspeed_config until this passes "
                "(configs/deepspeed/ has files that do), or use training.engine=torch, and report the file that fails."
            )

    def _compared(self, grad_norm: float, max_grad_norm: float) -> list[tuple[str, float, float]]:
        """Name, computed and taken of each weight in which they differ."""
        before, after = self._before, self._moments()
        self._before = after
        computed, self._computed = self._computed, {}
        if before is None:
            return []
        device = next(iter(self._weights.values())).device
        here = {name: computed[name].tolist() if name in computed else [0.0, 0.0] for name in self._weights}
        sums = sum_over_ranks({f"{part}/{name}": pair[part] for name, pair in here.items() for part in (0, 1)}, device)
        factor = min(1.0, max_grad_norm / (grad_norm + 1e-6)) / self._loss_scale
        wrong = []
        for name, weight in self._weights.items():
            expected, size = sums[f"0/{name}"] * factor, sums[f"1/{name}"] * factor
            taken = (after[name][0] - self._beta * before[name][0]) / (1 - self._beta)
            allowed = TOLERANCE.get(weight.dtype, max(TOLERANCE.values())) * size
            allowed += MOMENT_TOLERANCE * (before[name][1] + after[name][1]) / (1 - self._beta)
            if not abs(taken - expected) <= allowed:
                wrong.append((name, expected, taken))
        return wrong

    def _seen(self, name: str, gradient: torch.Tensor) -> None:
        found = _projection(gradient)
        self._computed[name] = self._computed[name] + found if name in self._computed else found

    @torch.no_grad()
    def _moments(self) -> dict[str, list[float]]:
        return {name: _projection(self._first_moment(weight)).tolist() for name, weight in self._weights.items()}


@torch.no_grad()
def _projection(values: torch.Tensor) -> torch.Tensor:
    """fp64 [2]: the product with a fixed vector without symmetries, and the norm. No copy of ``values`` is made."""
    rows = values.detach().reshape(-1, values.shape[-1] if values.dim() else 1)
    # In bf16's precision, so that it is the same vector for bf16 gradients and fp32 moments.
    across = torch.cos(torch.arange(rows.shape[1], device=rows.device) * 0.739 + 0.3).bfloat16()
    down = torch.cos(torch.arange(rows.shape[0], device=rows.device) * 1.618 + 0.7)
    product = torch.mv(rows, across.to(rows.dtype)).double() @ down.double()
    return torch.stack([product, torch.linalg.vector_norm(rows, dtype=torch.float32).double()])
