"""The pytest plugin on small suites, in this process: on for all, children too, and no trace at the end."""

import os

import pytest
from torch.distributed.device_mesh import DeviceMesh

import torch_overlay

pytest_plugins = ["pytester"]
FLAG = ("-p", "torch_overlay.testing.plugin", "--torch-overlay", "-p", "no:cacheprovider")


@pytest.fixture
def suite(pytester, monkeypatch):
    """Run pytest on one file, with these arguments; what it printed and its exit code."""
    monkeypatch.delenv("TORCH_OVERLAY_RUN", raising=False)
    torch_overlay.enable(), torch_overlay.disable()  # its modules stay when pytester forgets those of the inner session
    environ = dict(os.environ)

    def run(text, *arguments):
        pytester.makepyfile(test_inner=text)
        result = pytester.runpytest_inprocess(*arguments)
        assert not torch_overlay.is_enabled()
        ours = ("TORCH_OVERLAY_RUN", "PYTHONPATH")
        assert {name: os.environ.get(name) for name in ours} == {name: environ.get(name) for name in ours}
        return result

    return run


def test_a_suite_and_the_processes_that_it_starts_are_under_it(suite):
    result = suite(
        """
        import subprocess, sys, torch_overlay

        CODE = "import torch, torch_overlay; print(torch_overlay.is_enabled(), torch_overlay.options().flatten)"

        def test_here():
            assert torch_overlay.is_enabled() and torch_overlay.options().flatten == "whole"

        def test_there():
            assert subprocess.check_output([sys.executable, "-c", CODE], text=True) == "True whole\\n"
        """,
        *FLAG,
    )
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([r"torch_overlay: on in every process, torch \d.*, \d\d patches"])
    assert result.ret == 0


def test_without_the_flag_nothing_is_on(suite):
    text = "import torch_overlay\ndef test_off():\n    assert not torch_overlay.is_enabled()"
    result = suite(text, *FLAG[:2])
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*torch_overlay: on*")


def test_it_is_turned_on_again_after_a_test_that_turned_it_off(suite):
    text = """
        import torch_overlay

        def test_first():
            torch_overlay.disable()

        def test_second():
            assert torch_overlay.is_enabled()
        """
    result = suite(text, *FLAG)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*the overlay was off*before*", "test_inner.py::test_second"])


@pytest.mark.parametrize("forced", [False, True], ids=["a patch over ours", "ours put back"])
def test_a_trace_fails_a_session_whose_tests_pass(suite, forced):
    """Either somebody patched torch over us and never took it back, or something of ours stays."""
    stock = vars(DeviceMesh)["__getitem__"]
    text = f"""
        from torch.distributed.device_mesh import DeviceMesh
        import torch_overlay

        def test_leaves_its_patch():
            ours = DeviceMesh.__getitem__
            if {forced}:
                torch_overlay.disable()
                DeviceMesh.__getitem__ = ours
            else:
                DeviceMesh.__getitem__ = lambda self, names: ours(self, names)
        """
    result = suite(text, *FLAG)
    method = vars(DeviceMesh)["__getitem__"]
    DeviceMesh.__getitem__ = stock
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*torch isn't as the overlay found it*", "*DeviceMesh.__getitem__ is*"])
    assert (method is stock) != forced
