"""docs/developers/state.md lists the mutable state of the package: the list against the code."""

import re

import pytest

import house
import state

PAGE = (house.ROOT / "docs" / "developers" / "state.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \|(.*)\|$", PAGE, re.MULTILINE)


def test_the_page_lists_what_the_code_has():
    listed = {name for name, _ in ROWS}
    missing, gone = state.of_package() - listed, listed - state.of_package()
    assert not missing, f"docs/developers/state.md needs a row, with a bound and who clears it, for {sorted(missing)}"
    assert not gone, f"docs/developers/state.md lists what isn't there any more: {sorted(gone)}"
    assert len(ROWS) == len(listed), "a name stands there twice"


@pytest.mark.parametrize("name, rest", ROWS, ids=[name for name, _ in ROWS])
def test_a_row_says_what_it_holds_its_bound_and_who_clears_it(name, rest):
    cells = [cell.strip() for cell in rest.split("|")]
    assert len(cells) == 3 and all(cells)
