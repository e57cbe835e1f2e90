"""The table: one patch a row, in the order of ``patches/series``."""

from .patch import Patch

PATCHES: tuple[Patch, ...] = ()
