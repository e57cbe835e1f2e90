"""How long files and functions may be, and the table of how long they are (``pytest test/rooms/test_sizes.py -s``)."""

import pytest

import house
from torch_overlay.show.words import aligned

MAX_FILE, MAX_FUNCTION = 500, 45
SOURCES = house.sources("torch_overlay") + house.sources("tools")


def too_long(source):
    """The lines of the report that a file earns: itself when too long, then each of its functions that is."""
    found = [f"{source.name}: {source.lines} lines"] if source.lines > MAX_FILE else []
    return found + [
        f"{source.name}:{line} {name}: {count} lines"
        for count, name, line in source.functions()
        if count > MAX_FUNCTION
    ]


def table():
    """One row a file: its lines, its longest function; then the sum and the median function."""
    rows = []
    for source in SOURCES:
        longest, name, _ = (source.functions() or [(0, "", 0)])[0]
        rows.append((source.name, str(source.lines), str(longest), name))
    counts = sorted(count for source in SOURCES for count, *_ in source.functions())
    median = counts[len(counts) // 2] if counts else 0
    rows.append(("sum", str(sum(source.lines for source in SOURCES)), str(median), f"median of {len(counts)}"))
    return "\n".join(aligned([("file", "lines", "longest", "function"), *rows], right=(1, 2)))


def test_files_and_functions_are_short():
    print("\n" + table())
    long = [line for source in SOURCES for line in too_long(source)]
    assert not long, "\n".join([f"files end at {MAX_FILE} lines, functions at {MAX_FUNCTION}:", *long])


@pytest.mark.parametrize("lines, caught", [(45, 0), (46, 1)])
def test_a_long_function_is_caught(lines, caught):
    text = "@decorated\ndef f():\n" + "    x = 1\n" * (lines - 1)
    assert len(too_long(house.of(text))) == caught


def test_a_long_file_is_caught():
    assert too_long(house.of("x = 1\n" * MAX_FILE)) == []
    assert too_long(house.of("x = 1\n" * (MAX_FILE + 1))) == ["torch_overlay/distributed/x.py: 501 lines"]
