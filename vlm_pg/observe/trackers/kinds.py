"""The trackers there are: what each needs installed, and which class feeds it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_pg.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """One tracker.

    Args:
        module: what it is imported as.
        package: what pip installs.
        sink: "package.module:Class" of the ``Sink`` that feeds it.
        is_service: it may reach over a network, take over signals or hang, and so has a process of its own.
    """

    module: str
    package: str
    sink: str
    is_service: bool = True


_HERE = "vlm_pg.observe.trackers"
KINDS = {
    "tensorboard": Kind("tensorboard", "tensorboard", f"{_HERE}.tensorboard_sink:TensorboardSink", is_service=False),
    "wandb": Kind("wandb", "wandb", f"{_HERE}.wandb_sink:WandbSink"),
    "swanlab": Kind("swanlab", "swanlab", f"{_HERE}.swanlab_sink:SwanlabSink"),
    "mlflow": Kind("mlflow", "mlflow-skinny sqlalchemy alembic", f"{_HERE}.mlflow_sink:MlflowSink"),
}


def is_installed(module: str) -> bool:
    """Whether a package can be found. A folder of its name (wandb makes one where it is started) is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def refuse_missing(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker that is not installed; imports nothing."""
    for name in names:
        kind = KINDS[name]
        if not is_installed(kind.module):
            others = [other for other in names if other != name]
            raise ConfigError(
                f"observe.trackers names {name}, which is not installed. It is optional: install it with "
                f"'pip install {kind.package}', or set observe.trackers=[{','.join(others)}]."
            )
