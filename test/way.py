"""In which way the suite runs, by ``TORCH_OVERLAY_TEST``; the one place that says what "on" means for a test.

overlay   the default: torch as released, and the overlay on around each test
stock     torch as released: what a test says of stock must hold there; those that need the overlay are skipped
patched   a torch that carries our code itself, as the stack renders it: there is nothing to turn on, and what tests see
          is what they see under the overlay. Such a torch comes first on the path.
"""

import contextlib
import dataclasses
import importlib
import os

import pytest

from torch_overlay.testing import left_as_found

WAYS = ("overlay", "stock", "patched")
WAY = os.environ.get("TORCH_OVERLAY_TEST", "overlay")
if WAY not in WAYS:
    raise ValueError(f"TORCH_OVERLAY_TEST is one of {', '.join(WAYS)}, not {WAY!r}")
STOCK = WAY == "stock"

# For what stock can't do, and for what asks the package itself (status(), options, enable and disable).
needs_overlay = pytest.mark.skipif(STOCK, reason="what only the overlay does")
needs_package = pytest.mark.skipif(WAY != "overlay", reason="what the package torch_overlay does, beside its bodies")


@contextlib.contextmanager
def overlay(**options):
    """Our bodies in place inside, with these options, and torch as it was found after; on stock runs nothing is."""
    if WAY == "overlay":
        with left_as_found(**options):
            yield
    elif WAY == "patched" and options:
        settings = importlib.import_module("torch.distributed._settings")
        before = settings.set_settings(dataclasses.replace(settings.get_settings(), **options))
        try:
            yield
        finally:
            settings.set_settings(before)
    else:
        yield


class InThisWay:
    """Before one of the mixins of ``torch_overlay.testing``: its ranks do as the whole suite does."""

    overlay_options = {}

    @classmethod
    def overlay(cls):
        return overlay(**cls.overlay_options)
