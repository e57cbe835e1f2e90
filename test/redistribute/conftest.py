"""Every test of redistribution runs under the overlay; one that toggles it itself asks for ``overlay_off``."""

import pytest

from mesh_harness import overlay


@pytest.fixture(autouse=True)
def overlay_on(request):
    """The overlay around each test, on before the first mesh and off at the end."""
    if request.node.get_closest_marker("overlay_off"):
        yield
        return
    with overlay():
        yield
