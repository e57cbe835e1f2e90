"""A pytest plugin that runs any suite under the overlay, and every Python process that its tests start.

    python -m pytest -p torch_overlay.testing.plugin --torch-overlay test_mine.py

The session begins with enable(). It sets environment variables that turn the overlay on in child processes, as `run`
does. It ends with disable(), and fails if torch isn't as it was before. Options come from ``TORCH_OVERLAY_<NAME>``.
Without the flag the plugin does nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

import torch_overlay

from .. import errors, series
from ..commands import run
from .trace import Trace

KEY = pytest.StashKey["OverlaySession"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag `--torch-overlay`."""
    group = parser.getgroup("torch_overlay")
    group.addoption("--torch-overlay", action="store_true", help="run the session, child processes too, under it")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Turn the overlay on before any test is collected, if the flag is given. Raises as `torch_overlay.enable`."""
    if config.getoption("--torch-overlay"):
        config.stash[KEY] = session = OverlaySession()
        config.pluginmanager.register(session, "torch_overlay_session")
        session.begin()
        config.add_cleanup(session.end)  # --help and wrong arguments end without pytest_sessionfinish


class OverlaySession:
    """The overlay from pytest's configuration to the end of its last test.

    Attributes:
        before: what torch had at each target before enable(); empty where the overlay was on already.
        environ: the variables that were changed, with their former values.
        left: what the overlay left behind in torch, in words.
        switched_off: the tests before which the overlay was found off.
    """

    def __init__(self) -> None:
        self.on = False
        self.before = Trace({})
        self.environ: dict[str, str | None] = {}
        self.left: list[str] = []
        self.switched_off: list[str] = []

    def begin(self) -> None:
        """Turn the overlay on in this process and in those that it starts, by environment variables. Imports torch.
        Raises as `torch_overlay.enable`."""
        importlib.import_module(series.MESH)
        # Under `run` the overlay is on already, and what was before can't be recorded. Then `end` compares with torch's
        # source.
        if not torch_overlay.is_enabled():
            self.before = Trace.take()
        torch_overlay.enable()
        self.on = True
        wanted = run.environment(os.environ, {})
        # Only what differs is changed, and restored at the end: a test may set other variables meanwhile.
        self.environ = {name: os.environ.get(name) for name, value in wanted.items() if os.environ.get(name) != value}
        os.environ.update({name: wanted[name] for name in self.environ})

    def end(self) -> None:
        """Turn the overlay off, also where a test patched over it, add to `left` what it left behind, and restore the
        environment. A second call does nothing.

        Raises:
            OverlayError: an object of torch's couldn't be put back. `left` isn't complete then.
        """
        if not self.on:
            return
        self.on = False
        for name, value in self.environ.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        try:
            torch_overlay.disable()
        except errors.ForeignPatch as error:
            self.left.append(str(error))
            torch_overlay.disable(force=True)
        self.left += self.before.left()

    def pytest_report_header(self) -> str:
        """Return the line that pytest shows at the beginning."""
        status = torch_overlay.status()
        rows = sum(row.state in ("on", "waiting") for row in status.rows)
        return f"torch_overlay: on in every process, torch {status.release}, {rows} patches"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Turn the overlay on again if a test left it off. The rest of the session would run on stock torch."""
        if self.on and not torch_overlay.is_enabled():
            self.switched_off.append(item.nodeid)
            torch_overlay.enable()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn the overlay off, and let the session fail if it left something behind."""
        self.end()
        # A session that failed for another reason keeps its status.
        if self.left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write what the overlay left behind, and the tests before which it was off."""
        if self.left:
            terminalreporter.section("torch isn't as the overlay found it", red=True)
            terminalreporter.write_line("\n".join(self.left))
        if self.switched_off:
            terminalreporter.section("the overlay was off, and was turned on again, before", yellow=True)
            terminalreporter.write_line("\n".join(self.switched_off))
