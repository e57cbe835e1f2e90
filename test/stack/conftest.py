"""The tests that travel with the stack run here under the overlay; upstream there is nothing to turn on."""

import pytest

from way import WAY, overlay


@pytest.fixture(autouse=True)
def overlay_on():
    """The overlay around each test, on before the first mesh and off at the end."""
    if WAY == "stock":
        pytest.skip("what only the overlay does")
    with overlay():
        yield
