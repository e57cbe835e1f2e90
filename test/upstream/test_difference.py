"""How two outcomes compare, and what expectations say of it: plain values."""

import pytest
from pytorch_tests.difference import Difference, Expected, Verdict, judge, verdict
from pytorch_tests.results import Case


@pytest.mark.parametrize(
    "stock, other, expected, is_loss",
    [
        ("passed", "passed", Verdict.SAME, False),
        ("xfailed", "passed", Verdict.SAME, False),
        ("skipped", "skipped", Verdict.SAME, False),
        ("failed", "crashed", Verdict.FAILING, False),
        ("failed", "passed", Verdict.FIXED, False),
        (None, "passed", Verdict.FIXED, False),
        ("passed", "failed", Verdict.BROKEN, True),
        ("xfailed", "xpassed", Verdict.BROKEN, True),
        ("skipped", "timeout", Verdict.BROKEN, True),
        ("passed", None, Verdict.BROKEN, True),
        (None, "error", Verdict.BROKEN, True),
        ("passed", "skipped", Verdict.SKIPPED, True),
        ("failed", "skipped", Verdict.SKIPPED, False),
        ("skipped", "passed", Verdict.SKIPPED, False),
        ("skipped", None, Verdict.SKIPPED, False),
    ],
)
def test_verdicts(stock, other, expected, is_loss):
    found = one("f.py::T::t", stock, other)
    assert (verdict(stock, other), found.verdict, found.is_loss) == (expected, expected, is_loss)
    assert found.differs == (expected not in (Verdict.SAME, Verdict.FAILING))


def one(name, stock, other):
    return Difference(name, stock and Case(stock), other and Case(other))


BROKEN = one("f.py::T::t[a-1]", "passed", "failed")
SAME = one("f.py::T::u", "passed", "passed")
UNSEEN = one("f.py::T::v", "skipped", "skipped")


@pytest.mark.parametrize(
    "pattern, unexpected, stale",
    [
        ("f.py::T::t[a-1]", 0, None),
        ("f.py::*", 0, None),
        ("f.py::T::t[a-?]", 0, None),
        ("f.py::T::u", 1, "isn't broken any more, but same"),
        ("f.py::T::v", 1, None),  # skipped on both sides: this machine can't say
        ("f.py::T::w", 1, "matches no test case of its file any more"),
        ("g.py::T::t", 1, None),
    ],
)
def test_entries_hold_or_are_named(pattern, unexpected, stale):
    judgement = judge([BROKEN, SAME, UNSEEN], [Expected(pattern, "because")], whole=["f.py"])
    assert len(judgement.unexpected) == unexpected
    assert [why for _, why in judgement.stale] == ([stale] if stale else [])
    assert judgement.passed == (not unexpected and not stale)
