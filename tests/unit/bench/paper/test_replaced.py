"""Whatever counting replaces for a while is afterwards what it was, to the object, and where it was."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from vlm_pg.bench.paper.replaced import replaced


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    @staticmethod
    def static() -> str:
        return "static"

    def own(self) -> str:
        return "own"


NAMES = ("inherited", "static", "own", "never_there")


def owners() -> list[Any]:
    module = ModuleType("module")
    vars(module).update(own=len, static=print)
    thing = Owner()
    thing.own = lambda: "the object's"  # type: ignore[method-assign]
    linear = torch.nn.Linear(1, 1)  # sets attributes in its own way
    return [Owner, module, thing, linear]


@pytest.mark.parametrize("owner", owners(), ids=("class", "module", "object", "torch module"))
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(owner: Any, fails: bool) -> None:
    usual = dict(vars(owner))
    try:
        with replaced(owner, **dict.fromkeys(NAMES, len)), replaced(owner, own=max, inherited=max):
            assert (owner.own, owner.inherited, owner.static, owner.never_there) == (max, max, len, len)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert vars(owner).keys() == usual.keys()
    assert all(vars(owner)[name] is value for name, value in usual.items())


def test_nothing_is_replaced_where_one_cannot_be() -> None:
    class Fixed:
        __slots__ = ("__dict__", "a")

        def __setattr__(self, name: str, value: object) -> None:
            if name == "b":
                raise AttributeError(name)
            super().__setattr__(name, value)

    fixed = Fixed()
    with pytest.raises(AttributeError, match="b"), replaced(fixed, c=1, b=2):
        pass
    assert vars(fixed) == {}
