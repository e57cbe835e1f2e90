"""How long files and functions may be, and the table of how long they are (``pytest test/rooms/test_sizes.py -s``)."""

import pytest

import house

MAX_FILE, MAX_FUNCTION = 400, 60
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
    rows = [(source.name, source.lines, *(source.functions() or [(0, "", 0)])[0][:2]) for source in SOURCES]
    counts = sorted(count for source in SOURCES for count, *_ in source.functions())
    width = max(len(row[0]) for row in rows)
    text = [f"{name:{width}} {lines:5} {longest:5} {function}" for name, lines, longest, function in rows]
    median = counts[len(counts) // 2] if counts else 0
    total = sum(row[1] for row in rows)
    text.append(f"{'sum':{width}} {total:5}       median of {len(counts)} functions: {median} lines")
    return "\n".join([f"{'file':{width}} lines  longest function", *text])


def test_files_and_functions_are_short():
    print("\n" + table())
    long = [line for source in SOURCES for line in too_long(source)]
    assert not long, "\n".join([f"files end at {MAX_FILE} lines, functions at {MAX_FUNCTION}:", *long])


@pytest.mark.parametrize("lines, caught", [(60, 0), (61, 1)])
def test_a_long_function_is_caught(lines, caught):
    text = "@decorated\ndef f():\n" + "    x = 1\n" * (lines - 1)
    assert len(too_long(house.of(text))) == caught


def test_a_long_file_is_caught():
    assert too_long(house.of("x = 1\n" * MAX_FILE)) == []
    assert too_long(house.of("x = 1\n" * (MAX_FILE + 1))) == ["torch_overlay/distributed/x.py: 401 lines"]
