"""What --check keeps of what it found: by program, and only for the patches that there are."""

import pytest

from stack_trees import small_tree  # noqa: F401  (puts the tools on the path)

# isort: split
from stack.record import Record, program

HEAD = ("mesh", "at")
TEXT = '''"""What it is."""

SIDES = 2  # left and right
"""Of a thing."""


def f(x):
    """Adds."""
    return x + 1
'''


@pytest.mark.parametrize(
    "same", ["", "# more\n", '"""Other words."""\n'], ids=["as it was", "a comment", "another docstring"]
)
def test_words_are_no_other_program(same):
    assert program({"a.py": same + TEXT.replace("Adds.", "Adds one.").replace("x + 1", "(x + 1)")}) == program(
        {"a.py": TEXT}
    )


@pytest.mark.parametrize(
    ("path", "old", "new"), [("a.py", "x + 1", "x + 2"), ("a.py", "SIDES = 2", "SIDES: int = 2"), ("b.py", "", "")]
)
def test_code_and_names_of_files_are(path, old, new):
    assert program({path: TEXT.replace(old, new) if old else TEXT}) != program({"a.py": TEXT})
    assert program({"a.py": TEXT, "b.py": TEXT}) != program({"a.py": TEXT})


def test_a_row_stands_for_its_release_and_program(tmp_path):
    path = tmp_path / "checked.csv"
    new, old = (Record(release, HEAD, ["first", "second"], path) for release in ("2.15.0", "2.13.0"))
    new.keep("second", "b" * 16, ["138, of two", "c1"])
    new.keep("first", "a" * 16, ["3", "c1"])
    old.keep("first", "a" * 16, ["4", "c2"])
    assert new.found("second", "b" * 16) == ["138, of two", "c1"] and new.found("second", "c" * 16) is None
    assert old.found("second", "b" * 16) is None and old.found("first", "a" * 16) == ["4", "c2"]
    new.keep("first", "d" * 16, ["5", "c3"])
    assert new.found("first", "a" * 16) is None and new.found("first", "d" * 16) == ["5", "c3"]
    assert [line.split(",")[:2] for line in path.read_text().splitlines()[1:]] == [
        ["2.13.0", "first"],
        ["2.15.0", "first"],
        ["2.15.0", "second"],
    ]


def test_rows_of_patches_that_are_gone_go_and_rows_of_other_cells_are_no_rows(tmp_path):
    path = tmp_path / "checked.csv"
    Record("2.13.0", HEAD, ["first", "second"], path).keep("second", "b", ["1", "c1"])
    Record("2.13.0", HEAD, ["first"], path).keep("first", "a", ["1", "c1"])
    assert "second" not in path.read_text()
    assert Record("2.13.0", (*HEAD, "moves"), ["first"], path).found("first", "a") is None
