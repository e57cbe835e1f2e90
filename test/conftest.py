"""What every test shares: how hard hypothesis searches, and that a test leaves torch as it found it.

Profiles: ``ci`` (the default: the same examples on every run) and ``nightly`` (``TORCH_OVERLAY_NIGHTLY=1``: new random
examples, twenty times as many). A test that needs its own number takes it in proportion, so that the nightly run widens
it: ``settings(max_examples=3 * settings.default.max_examples)``. One that goes through a long list takes a `sample`.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

import modes
import on_device
from width import NIGHTLY

pytest_addoption, pytest_configure = on_device.add_options, on_device.pass_on
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("nightly" if NIGHTLY else "ci")
# Torch's helpers for tests load a profile of theirs when they are imported, of 10 examples, or 50 where CI is set. The
# class refuses to be changed, so this goes past it.
type.__setattr__(settings, "load_profile", staticmethod(lambda name: None))


if os.environ.get("TORCH_OVERLAY_TEST") == "patched":
    import way  # noqa: F401  before a test imports our bodies, which torch itself then has


def left_behind() -> list[str]:
    """What the process holds now that no test may leave: the overlay on, a process group open. Imports nothing."""
    left = []
    overlay = sys.modules.get("torch_overlay")
    if overlay is not None and overlay.is_enabled():
        left.append("the overlay is still enabled")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        left.append("torch.distributed is still initialized")
    return left


@pytest.fixture(autouse=True)
def leaves_torch_as_found():
    """Fails a test that leaves the overlay on or a process group open, before the next test trips over it."""
    before = left_behind()  # a world that a class or a module opened for all its tests is theirs to close
    yield
    modes.none_is_on()
    left = [what for what in left_behind() if what not in before]
    assert not left, f"a test must leave torch as it found it, but {' and '.join(left)}"
