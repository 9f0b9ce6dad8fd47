"""The group that a write config names, for puts that become several keys. The caller's config is never changed."""

from __future__ import annotations

import copy
from typing import Any


def group_of(config: Any) -> str | None:
    """Return the group that a config names; None for no group. ValueError unless it names one at most."""
    return _named(config) or None


def declines_group(config: Any) -> bool:
    """Return whether the config says that there shall be no group, by the name ""."""
    return _named(config) == ""


def config_for_keys(config: Any, num_keys: int) -> Any:
    """Return the config for a put of so many keys: itself where it fits, else a copy with the group of each key."""
    groups = getattr(config, "group_ids", None)
    if groups is None:
        return config
    name = _named(config)
    if name is not None and num_keys == 1 and not isinstance(groups, str):
        return config
    return with_group(config, name, num_keys)


def with_group(config: Any, group: str | None, num_keys: int) -> Any:
    """Return a copy of the config in which all keys are in one group."""
    changed = copy.copy(config)
    changed.group_ids = None if group is None else [group] * num_keys
    return changed


def options(config: Any, num_keys: int) -> dict[str, Any]:
    """Return the config as arguments of a store's put, which may know no config."""
    return {} if config is None else {"config": config_for_keys(config, num_keys)}


def _named(config: Any) -> str | None:
    groups = getattr(config, "group_ids", None)
    if groups is None or isinstance(groups, str):
        return groups
    named = list(groups)
    if len(named) > 1:
        raise ValueError("config.group_ids names one group for all objects of a bundle")
    if not all(isinstance(each, str) for each in named):
        raise ValueError("config.group_ids must contain strings")
    return named[0] if named else None
