"""Mixins for torch's test classes with many ranks: the overlay on in every rank while a test runs, and no trace after.

Each stands in front of torch's class. What "on" means is one method, `overlay`: a suite that runs in other ways too
(on stock, on a patched torch) overrides it.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from .trace import left_as_found


class _UnderOverlay:
    """What the mixins share."""

    overlay_options: ClassVar[Mapping[str, object]] = MappingProxyType({})

    @classmethod
    def overlay(cls) -> contextlib.AbstractContextManager[Any]:
        """What surrounds the work of a rank; AssertionError at its end if torch isn't as it was found."""
        return left_as_found(**cls.overlay_options)


class OverlayProcesses(_UnderOverlay):
    """For ``MultiProcessTestCase``, and for ``DTensorTestBase`` and ``LocalDTensorTestBase``, which derive from it.

    In each rank the overlay is on from before the test method, with its decorators (``with_comms``), to its end.
    """

    def join_or_run(self, fn: Callable[[], object]) -> Any:
        @functools.wraps(fn)
        def under_overlay(*args: Any, **kwargs: Any) -> object:
            with type(self).overlay():
                return fn(*args, **kwargs)

        return super().join_or_run(under_overlay)  # type: ignore[misc]


class OverlayContinuous(_UnderOverlay):
    """For ``MultiProcContinuousTest``, whose ranks outlive a test: on while a rank opens its world and in each test."""

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        with cls.overlay():
            super()._init_pg(rank, world_size, rdvz_file)  # type: ignore[misc]

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        with cls.overlay():
            super()._run_test_given_id(test_id, **kwargs)  # type: ignore[misc]


class OverlayThreads(_UnderOverlay):
    """For ``MultiThreadedTestCase`` and ``DTensorOpTestBase``: one process plays all ranks, and they share the overlay.

    On from before the threads start (torch has ``setUp`` start them) until after ``tearDown``.
    """

    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(type(self).overlay())
        self.addCleanup(stack.close)  # type: ignore[attr-defined]
        super().setUp()  # type: ignore[misc]
