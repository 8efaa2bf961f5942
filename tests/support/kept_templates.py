"""Processes that workers are forked from, kept from one pool of a test to the next one's: each imports torch anew."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from vlm_pg.killable.pool import AllEnded, Worker
from vlm_pg.killable.template import ANSWER_SECONDS, Template

# Each is some 300 MB.
MOST = 2


class _Kept(NamedTuple):
    key: str
    control: Any
    stderr: Any
    process: Any


class KeptTemplates:
    """Of one process. ``in_use`` is what makes templates come from here; ``end`` ends what is kept."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._pid = os.getpid()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, a template that ends in peace is kept, and taken for one that would be started just alike."""
        restart, end_all = Template.restart, Template.end_all

        def begin(template: Template) -> None:
            found = [one for one in self._kept if one.key == _key(template) and one.process.poll() is None]
            if os.getpid() != self._pid or not found:
                restart(template)
                return
            self._kept.remove(found[-1])
            _, template._control, template._stderr, template._process = found[-1]

        def end(template: Template, workers: Sequence[Worker], at_once: bool) -> None:
            if at_once or os.getpid() != self._pid or not _is_alone(template, workers):
                end_all(template, workers, at_once)
                return
            template._stderr.truncate(0)
            self._kept.append(_Kept(_key(template), template._control, template._stderr, template._process))
            if len(self._kept) > MOST:
                _end(self._kept.pop(0))

        with mock.patch.object(Template, "restart", begin), mock.patch.object(Template, "end_all", end):
            yield

    def end(self) -> None:
        while self._kept:
            _end(self._kept.pop())


def _key(template: Template) -> str:
    """All that a fresh interpreter would take from here."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]
    own = (template._modules, template._function, template._arguments, dict(template._environment))
    return json.dumps([*own, environment, os.getcwd(), limits], sort_keys=True)


def _is_alone(template: Template, workers: Sequence[Worker]) -> bool:
    """Whether it lives, and its workers are no more."""
    try:
        for worker in workers:
            template.end(worker, hung_up=False)
    except AllEnded:
        return False
    return template._process.poll() is None


def _end(kept: _Kept) -> None:
    kept.control.close()
    kept.process.wait(ANSWER_SECONDS)
    kept.stderr.close()
