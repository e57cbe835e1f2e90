"""Peak memory beyond the source is at most stock's, for all pairs on (2, 2, 2) with every view flattened."""

import pathlib
import sys

import pytest

from way import needs_package
from width import NIGHTLY, sample

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

from benchmarks.memory import all_pairs, peaks_of
from benchmarks.sides import OVERLAY, STOCK

pytestmark = needs_package


@pytest.fixture(autouse=True)
def overlay_on():
    """In place of the one for all tests here: this turns it on itself."""


def test_no_pair_takes_more_memory_than_stock(monkeypatch):
    """As large tensors run, on a small one: below a megabyte a second copy is cheaper than more calls, and a round has
    16 MB at least."""
    from torch_overlay.distributed.tensor._planner import cost
    from torch_overlay.distributed.tensor._runner import exchange

    monkeypatch.setattr(exchange, "LARGE_BYTES", {"cpu": 0})
    monkeypatch.setattr(cost, "_ASSUMED", {"cpu": cost.Cost(round_bytes=1)})
    pairs = [*sample(all_pairs(), 5)]
    stock, ours = (peaks_of(side, pairs, (512, 64), rank=0) for side in (STOCK, OVERLAY))
    assert len(pairs) == (1701 if NIGHTLY else 341)
    assert [str(pair) for pair, one, other in zip(pairs, stock, ours, strict=True) if other.peak > one.peak] == []
    assert sum(one.peak for one in ours) < 0.36 * sum(one.peak for one in stock)
    assert [str(pair) for pair, one, other in zip(pairs, stock, ours, strict=True) if other.kept > one.kept] == []
