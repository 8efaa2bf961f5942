"""Evaluation of what a server has: who answers then, what is known of it, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError
from vlm_pg.eval.exam import EvalSet
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.lora import adapter_base
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.server.errors import ServerError

if TYPE_CHECKING:
    from vlm_pg.rollout.server.respondent import Respondent

GOES_ON = "The same command goes on where this one ended."


class ServerExam:
    """The server that answers in place of a policy in this process; asked at once what it is.

    Args:
        config: ``rollout.server``, and the sets.
        checkpoint: whose processor makes the prompts; what ``transformers serve`` is told to load.
        model: of the checkpoint, without its weights; used in the thread that asks, and in no other.
        home: folder, visible to the server, in which the checkpoint is laid out for ``transformers serve``.
        warn: shows one line to people; no line is shown twice.

    Raises:
        ConfigError: no URL, a key that cannot be sent, packages that are not installed, or an adapter's checkpoint for
            a server that cannot load one.
        ServerError: no answer, no OpenAI-compatible server, or one that does not serve ``rollout.server.model``.
    """

    def __init__(
        self, config: RunConfig, checkpoint: Path, model: WeightlessPolicy, home: Path, warn: Callable[[str], None]
    ):
        try:
            from vlm_pg.rollout.server.respondent import ask_what_it_is
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"rollout.engine is server, which needs the package {error.name}. Install it with: "
                "pip install 'vlm-pg[server]'."
            ) from error
        self._config, self._checkpoint, self._model, self._home = config, checkpoint, model, home
        self._warn, self._warned = warn, set[str]()
        self._stopped = Event()
        self.server = ask_what_it_is(config.rollout, self._stopped.is_set, self._warn_once, GOES_ON)
        if self.server.loads_by_name and adapter_base(checkpoint):
            raise ConfigError(
                f"{checkpoint} is an adapter, which transformers serve cannot load. Export it (vlm-pg export) and "
                "evaluate that folder, or set rollout.engine=in_process."
            )

    def introduction(self) -> Iterator[str]:
        """Whose answers these will be, and which settings do nothing then."""
        url, kind, cache = self._config.rollout.server.url, self.server.kind, self._config.cache
        if self.server.loads_by_name:
            yield f"answers of the server at {url} ({kind}), which is told to load {self._checkpoint}"
        else:
            name = self.server.shown(self.server.check_model(self._config.rollout.server.model))
            yield (
                f"answers of {name!r} at {url} ({kind}): which weights that server was started with is not known "
                f"here; {self._checkpoint} is read for its processor and config alone"
            )
        if cache.folder is not None and cache.features is not False:
            yield "cache.features: nothing is kept or read, for the tower is the server's"

    def stop(self) -> None:
        """Let whatever is being asked raise InterruptedError."""
        self._stopped.set()

    def sampler(self, item: EvalSet) -> Sampler:
        """Who answers the questions of a set.

        Raises:
            ServerError: the server cannot be given its sampling settings, its videos, or the beginning of its answers.
        """
        from vlm_pg.rollout.server.unscored import UnscoredAnswers

        sampler = UnscoredAnswers(self._respondent(item))
        if self.server.loads_by_name:
            sampler.use_checkpoint(self._checkpoint)
        return sampler

    def record(self) -> dict[str, Any]:
        """What decides about the answers and is known of it: the kind of server, its model, what it is asked.

        ``asked``: by set, the fields of a request that say how to sample.

        Raises:
            ServerError: as ``sampler``, of what shows without the questions.
        """
        config, model = self._config, str(self._checkpoint)
        if not self.server.loads_by_name:
            model = self.server.shown(self.server.check_model(config.rollout.server.model))
        files = config.data.eval
        sets = [
            EvalSet(name, files[name], (), protocol=config.eval.protocol_of(name))
            for name in config.eval.chosen_sets(list(files))
        ]
        asked = {item.name: self._respondent(item).fields for item in sets}
        return {"kind": self.server.kind, "model": model, "asked": asked}

    def _respondent(self, item: EvalSet) -> Respondent:
        from vlm_pg.rollout.server.messages import ChatMessages
        from vlm_pg.rollout.server.respondent import Respondent

        if item.protocol is not None and item.protocol.subtitles == "interleaved":
            raise ServerError(
                f"Protocol {item.protocol.name} of the set {item.name} shows frames and subtitles in turn, which a "
                "server cannot be sent yet: it is sent media, then words. Choose another protocol, or "
                "rollout.engine=in_process."
            )
        prefix = "" if item.protocol is None else item.protocol.answer_prefix
        messages = ChatMessages(self._model, {sample.sample_id: sample for sample in item.samples}, prefix)
        return Respondent(
            self._model,
            item.rollout(self._config),
            item.seed(self._config),
            self._stopped.is_set,
            messages,
            self._home,
            self._warn_once,
            GOES_ON,
            self.server,
        )

    def _warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self._warn(line)
