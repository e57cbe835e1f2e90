"""How two outcomes compare, and what expectations say of it: plain values."""

import pytest
from pytorch_tests.difference import Difference, Expected, Verdict, again, judge, verdict
from pytorch_tests.results import Case, Results


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


def test_a_case_that_agrees_alone_is_flaky_and_one_that_does_not_is_what_it_is_then():
    first = one("f.py::T::t", "failed", "passed")
    alone = {outcome: Results({"T::t": Case(outcome)}) for outcome in ("passed", "failed")}
    assert again(first, alone["passed"], alone["passed"]).verdict is Verdict.FLAKY
    assert again(first, alone["failed"], alone["failed"]).verdict is Verdict.FLAKY
    assert again(first, alone["passed"], alone["failed"]).verdict is Verdict.BROKEN
    assert not again(first, alone["passed"], alone["passed"]).is_loss


@pytest.mark.parametrize(
    "condition, release, expected",
    [
        ("", (2, 13, 0), True),
        (">=2.13", (2, 13, 0), True),
        (">=2.13.0,<2.15.0", (2, 15, 0), False),
        (">=2.13.0, <2.15.0", (2, 14, 1), True),
        ("==2.13", (2, 13, 0), True),
        (">2.13,<=2.14.1", (2, 14, 1), True),
    ],
)
def test_conditions_on_releases(condition, release, expected):
    entry = Expected("*", "because", condition)
    assert entry.in_force("overlay", release) == expected
    assert not entry.in_force("patched", release)


def test_a_condition_that_says_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"looks like '>=2.13.0,<2.15.0', not '2.13'"):
        Expected("*", "because", "2.13").in_force("overlay", (2, 13, 0))


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


def test_an_entry_says_which_way():
    """One that was to be fixed, and is broken instead, is both stale and unexpected; a flaky one is neither."""
    entry = Expected("f.py::T::t*", "because", verdict=Verdict.FIXED)
    judgement = judge([BROKEN], [entry])
    assert judgement.unexpected == (BROKEN,) and judgement.stale == ((entry, "isn't fixed any more, but broken"),)
    flaky = Difference(BROKEN.name, BROKEN.stock, BROKEN.other, flaky=True)
    assert judge([flaky], [entry]).passed


def test_a_part_of_a_file_says_nothing_of_the_rest():
    assert judge([BROKEN], [Expected("f.py::T::*", "because"), Expected("f.py::T::gone", "because")]).passed
