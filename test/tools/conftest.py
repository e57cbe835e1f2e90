"""The bench without a process of its own: its ranks are forked from the server of this one, which has torch."""

import pathlib
import sys

import pytest

import forks

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@pytest.fixture
def bench_here(tmp_path, monkeypatch, capsys):
    """Runs ``tools/bench.py`` with these arguments in a folder of its own; what it printed."""
    monkeypatch.syspath_prepend(TOOLS)
    import bench
    from benchmarks import process

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_PRELOAD", forks.PRELOADED)
    for name, text in process._QUIET.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("COLUMNS", "120")  # where no name takes two lines

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        assert bench.main() == 0
        return capsys.readouterr().out

    return run
