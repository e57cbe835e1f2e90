"""The switches that these bodies have in torch's configuration module upstream, for tests that run in both homes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from ._settings import get_settings, set_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {
    "mesh_share_groups": "share_groups",
    "mesh_create_groups": "create",
    "mesh_joint_groups": "flatten",
    "mesh_check": "check_mesh",
    "mesh_topology": "topology",
    "redistribute_cost": "cost",
}


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Other choices for one block of code; what isn't a choice here (plans are always on) is left as it is."""
    chosen = {SETTINGS[name]: value for name, value in changes.items() if name in SETTINGS}
    before = set_settings(dataclasses.replace(get_settings(), **chosen))
    try:
        yield
    finally:
        set_settings(before)
