"""The tools on the path: the list of expectations, and the tests of what reads it, import them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
