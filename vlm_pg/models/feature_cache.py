"""Whether a policy's visual features are cached on disk, and if not, why."""

from __future__ import annotations

import math
from contextlib import nullcontext

from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import Store
from vlm_pg.models.digests import Gather, tower_digest
from vlm_pg.models.family import Family
from vlm_pg.models.feature_store import KIND, FeatureStore
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings


def keep_features(policy: Policy, settings: CacheSettings, gather: Gather = nullcontext) -> str | None:
    """Take the policy's visual features from the cache from now on. A collective, as ``tower_digest``.

    Returns:
        What is cached or why nothing is, for the user; None where there is no cache.

    Raises:
        ConfigError: the cache cannot be used.
    """
    if settings.folder is None:
        return None
    why = why_not_cached(policy.settings, policy.family, settings)
    if why is not None:
        return f"visual features: not kept in cache.folder ({why})"
    store = Store(settings.folder, KIND, settings.max_bytes)
    tower = tower_digest(policy.model, policy.family, gather)
    config = policy.model.config
    levels, width = policy.family.deepstack_layers(config), config.get_text_config().hidden_size
    shape = (1 + levels, width) if levels else (width,)  # of one visual token
    size = math.prod(shape) * policy.dtype.itemsize / 1024
    policy.vision.store = FeatureStore(store, tower, policy.tower_calls, policy.device, shape)
    return (
        f"visual features: kept in {settings.folder}, {size:.1f} KiB a visual token, by the "
        f"media and the frozen vision tower ({tower[:12]})"
    )


def why_not_cached(model: ModelSettings, family: Family, settings: CacheSettings) -> str | None:
    """The reason for which a cache holds no visual features of a model; None where it does."""
    if settings.features is False:
        return "cache.features=false"
    if not family.reads_media:
        return f"{family.model_type} reads text alone"
    if model.trains_vision:
        return f"model.train=[{', '.join(model.train)}], so they change with every update"
    return None if model.share_prefix else "model.share_prefix=false, so all is computed anew"
