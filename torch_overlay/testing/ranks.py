"""Mixins for torch's test classes of many ranks: the overlay is on in each rank while a test runs, with no trace after.

Each comes before torch's class. A suite that also runs without the overlay (on stock torch, or on a torch that carries
our code) overrides the method `overlay`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from .trace import left_as_found


class _UnderOverlay:
    """The base of the mixins."""

    overlay_options: ClassVar[Mapping[str, object]] = MappingProxyType({})

    @classmethod
    def overlay(cls) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a rank's work: AssertionError at its end if torch isn't as before."""
        return left_as_found(**cls.overlay_options)


class OverlayProcesses(_UnderOverlay):
    """For ``MultiProcessTestCase``, and for ``DTensorTestBase`` and ``LocalDTensorTestBase``, which derive from it.

    In each rank the overlay is on while the test method and its decorators (``with_comms``) run.
    """

    def join_or_run(self, fn: Callable[[], object]) -> Any:
        """Run torch's method of this name, with the test and its decorators under the overlay in the rank's process."""

        # In the rank's process, and around the decorators: `with_comms` opens the world, and makes meshes.
        @functools.wraps(fn)
        def under_overlay(*args: Any, **kwargs: Any) -> object:
            with type(self).overlay():
                return fn(*args, **kwargs)

        return super().join_or_run(under_overlay)  # type: ignore[misc]


class OverlayContinuous(_UnderOverlay):
    """For ``MultiProcContinuousTest``, whose ranks outlive a test.

    The overlay is on in each test, and while a rank opens its world.
    """

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        with cls.overlay():
            super()._init_pg(rank, world_size, rdvz_file)  # type: ignore[misc]

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        with cls.overlay():
            super()._run_test_given_id(test_id, **kwargs)  # type: ignore[misc]


class OverlayThreads(_UnderOverlay):
    """For ``MultiThreadedTestCase`` and ``DTensorOpTestBase``, whose ranks are threads of one process.

    The overlay is on from before the threads start, which ``setUp`` does, until after ``tearDown``.
    """

    def setUp(self) -> None:
        """Turn the overlay on until the cleanups of the test run, and start the threads."""
        # A cleanup and not tearDown: cleanups run after tearDown, which ends the threads, and also if setUp fails.
        stack = contextlib.ExitStack()
        stack.enter_context(type(self).overlay())
        self.addCleanup(stack.close)  # type: ignore[attr-defined]
        super().setUp()  # type: ignore[misc]
