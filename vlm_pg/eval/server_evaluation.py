"""Evaluation of a model behind a server: its samplers, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError, ServerError
from vlm_pg.eval.eval_set import EvalSet
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.rollout.contracts import Sampler

if TYPE_CHECKING:
    from vlm_pg.rollout.server.generator import ServerGenerator

ADVICE = "The same command goes on where this one ended."


class ServerEvaluation:
    """A server in place of a policy in this process; its kind is queried at once.

    Args:
        config: with ``rollout.server`` and the sets.
        checkpoint: provides the processor.
        model: of the checkpoint, without its weights; used only in the thread that sends requests.
        warn: prints one line; no line is repeated.

    Raises:
        ConfigError: no URL, a key that cannot be sent, or packages that are not installed.
        ServerError: no answer, no OpenAI-compatible server, or one that does not serve ``rollout.server.model``.
    """

    def __init__(self, config: RunConfig, checkpoint: Path, model: WeightlessPolicy, warn: Callable[[str], None]):
        try:
            from vlm_pg.rollout.server.generator import query_server
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"rollout.engine is server, which needs the package {error.name}. Install it with: "
                "pip install 'vlm-pg[server]'."
            ) from error
        self._config, self._checkpoint, self._model = config, checkpoint, model
        self._warn, self._warned = warn, set[str]()
        self._stopped = Event()
        # Makes running requests raise InterruptedError.
        self.stop = self._stopped.set
        self.server = query_server(config.rollout, self._stopped.is_set, self._warn_once, ADVICE)

    def introduction(self) -> Iterator[str]:
        """Lines on the model that answers, and on settings without effect."""
        url, kind, cache = self._config.rollout.server.url, self.server.kind, self._config.cache
        yield (
            f"answers of {self._model_name()!r} at {url} ({kind}): which weights that server was started with is not "
            f"known here; {self._checkpoint} is read for its processor and config alone"
        )
        if cache.folder is not None and cache.features is not False:
            yield "cache.features: nothing is kept or read, for the tower is the server's"

    def sampler(self, item: EvalSet) -> Sampler:
        """The sampler of a set.

        Raises:
            ServerError: the server does not support its sampling settings, its videos, or its answer prefix.
        """
        from vlm_pg.rollout.server.engine import UnscoredSampler

        return UnscoredSampler(self._generator(item))

    def record(self, items: Sequence[EvalSet] | None = None) -> dict[str, Any]:
        """What determines the answers, as far as known: kind of server, model, and sampling fields of requests by set.

        Args:
            items: the sets, without their questions; None: the chosen evaluation sets.

        Raises:
            ServerError: as ``sampler``, without looking at the questions.
        """
        files, settings = self._config.data.eval, self._config.eval
        if items is None:
            names = settings.chosen_sets(list(files))
            items = [EvalSet(name, files[name], (), protocol=settings.protocol_of(name)) for name in names]
        fields = {item.name: self._generator(item).fields for item in items}
        return {"kind": self.server.kind, "model": self._model_name(), "asked": fields}

    def _model_name(self) -> str:
        return self.server.shown(self.server.check_model(self._config.rollout.server.model))

    def _generator(self, item: EvalSet) -> ServerGenerator:
        from vlm_pg.rollout.server.generator import ServerGenerator
        from vlm_pg.rollout.server.messages import ChatMessages

        if item.protocol is not None and item.protocol.subtitles == "interleaved":
            raise ServerError(
                f"Protocol {item.protocol.name} of the set {item.name} shows frames and subtitles in turn, which a "
                "server cannot be sent yet: it is sent media, then words. Choose another protocol, or "
                "rollout.engine=in_process."
            )
        prefix = "" if item.protocol is None else item.protocol.answer_prefix
        return ServerGenerator(
            self._model,
            item.rollout(self._config),
            item.seed(self._config),
            self._stopped.is_set,
            ChatMessages(self._model, {sample.sample_id: sample for sample in item.samples}, prefix),
            self._warn_once,
            ADVICE,
            self.server,
        )

    def _warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self._warn(line)
