"""How widely the tests look: a sample at each change, everything at night (``TORCH_OVERLAY_NIGHTLY=1``).

The switch is no option of the overlay, which would warn of it in every process that a test starts. So it is taken out
of the environment, and goes on under another name to those who ask here: ranks, and the workers of pytest-xdist.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PASSED_ON = "OVERLAY_TESTS_NIGHTLY"
if "TORCH_OVERLAY_NIGHTLY" in os.environ:
    os.environ[PASSED_ON] = os.environ.pop("TORCH_OVERLAY_NIGHTLY")
NIGHTLY = os.environ.get(PASSED_ON) == "1"


def sample(items: Iterable[T], every: int, first: int = 0) -> Iterator[T]:
    """One in so many of them, the same at each run; all of them at night.

    Products of placements have periods of 3 and 4. A step of 5 or 7 meets every kind on each axis.
    """
    return iter(items) if NIGHTLY else itertools.islice(items, first % every, None, every)
