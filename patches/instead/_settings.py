"""Upstream the choices are in torch.distributed.config."""

import dataclasses

from torch.distributed import config


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may choose about groups and redistribution.

    ``topology`` is one ``(axis name, bytes per second, seconds of latency)`` for each axis that the user described.
    """

    share_groups: str
    create_groups: str
    joint_groups: str
    check_mesh: bool
    cost: str
    topology: tuple[tuple[str, float, float], ...] | None
    plan: bool


def _one_of(name: str, *allowed: str) -> str:
    """The choice of this name in the configuration. Raises ValueError for any but these."""
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"torch.distributed.config.{name} is one of {', '.join(allowed)}, got {value!r}")
    return value


def _topology() -> tuple[tuple[str, float, float], ...] | None:
    """The axes that mesh_topology describes. Raises ValueError for what is no speed and latency by name."""
    rows = config.mesh_topology
    if rows is None:
        return None
    try:
        found = tuple((name, float(speed), float(latency)) for name, speed, latency in rows)
        if all(isinstance(name, str) and speed > 0 and latency >= 0 for name, speed, latency in found):
            return found
    except (TypeError, ValueError):
        pass
    raise ValueError(
        "torch.distributed.config.mesh_topology is (name, bytes per second, seconds of latency) for each axis, "
        f"got {rows!r}"
    )


def get_settings() -> Settings:
    """The choices in force now."""
    return Settings(
        share_groups=_one_of("mesh_share_groups", "names", "ranks", "world", "off"),
        create_groups=_one_of("mesh_create_groups", "members", "world"),
        joint_groups=_one_of("mesh_joint_groups", "existing", "whole", "create"),
        check_mesh=config.mesh_check,
        cost=_one_of("redistribute_cost", "steps", "plan"),
        topology=_topology(),
        plan=config.plan_redistribution,
    )


set_settings = ...
_current = ...
build = ...
DEFAULT = ...
__all__ = ...  # noqa: PLE0605
