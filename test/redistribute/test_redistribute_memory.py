"""Peak memory beyond the source is at most stock's, for all pairs on (2, 2, 2) with every view flattened."""

import pathlib
import sys

import pytest

from way import needs_package

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

from benchmarks.memory import all_pairs, peaks_of
from benchmarks.sides import OVERLAY, STOCK

pytestmark = needs_package

# One collective where stock takes two or more, and each of stock's has less to hold: the price of the plan, in pieces
# that must lie one after the other to be sent. Over stock's: from 1.06 to 1.8.
MORE = """
    P,P,P -> S0,S0,S1   P,P,R -> S0,S0,S0   P,P,R -> S0,S0,S1   S0,S0,S0 -> R,R,S1   S0,P,S0 -> R,R,S1
    S0,R,P -> R,S0,S1   S0,P,R -> R,S1,S0   R,S0,P -> S0,R,S1   S1,S0,S0 -> S1,R,S1  S0,S1,S0 -> R,S1,S1
    S0,S0,S0 -> S0,R,S1 S0,S0,R -> R,S1,R   S0,R,S0 -> R,R,S1   R,S0,S0 -> R,R,S1    S0,S0,P -> R,S1,R
    P,S0,S0 -> R,R,S1
"""


@pytest.fixture(autouse=True)
def overlay_on():
    """In place of the one for all tests here: this turns it on itself."""


def test_no_pair_takes_more_memory_than_stock(monkeypatch):
    """As large tensors run, on a small one: below a megabyte a second copy is cheaper than more calls."""
    from torch_overlay.distributed.tensor import _pack

    monkeypatch.setattr(_pack, "LARGE", 0)
    pairs = all_pairs()
    stock, ours = (peaks_of(side, pairs, (64, 64), rank=0, gpu=False) for side in (STOCK, OVERLAY))
    more = {str(pair) for pair, one, other in zip(pairs, stock, ours, strict=True) if other.peak > one.peak}
    known = {f"2,2,2: {source} -> {target}" for source, _, target in zip(*[iter(MORE.split())] * 3, strict=True)}
    assert len(pairs) == 1701
    assert more == known
    assert sum(one.peak for one in ours) < 0.45 * sum(one.peak for one in stock)
    assert [str(pair) for pair, one, other in zip(pairs, stock, ours, strict=True) if other.kept > one.kept] == []
