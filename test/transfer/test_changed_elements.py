"""Which elements of a message changed, against a twin that looks at one element after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_overlay.transfers.blocks import BY_WIDTH
from torch_overlay.transfers.changes import Form, changed, is_longer, pack, size_of

SHARES = 0, 0.0005, 0.003, 0.02, 0.1, 0.3, 1  # of the elements that change


@st.composite
def forms(draw):
    """Up to three widths, the widest first; from a few elements to enough for every way of comparing."""
    widths = sorted(draw(st.sets(st.sampled_from([*BY_WIDTH]), min_size=1, max_size=3)), reverse=True)
    ends, end = [], 0
    for _ in widths:
        end += draw(st.integers(0, 40) | st.integers(0, 30_000))
        ends.append(end)
    return Form(tuple(widths), tuple(ends))


def by_element(now, before, form):
    """The numbers of the elements that differ, in a loop over the widths."""
    found, begin = [], 0
    for width, first, last in form.parts:
        end = begin + width * (last - first)
        rows = (now[begin:end] != before[begin:end]).view(-1, width).any(1)
        found += [first + place for place, differs in enumerate(rows.tolist()) if differs]
        begin = end
    return found


@given(forms(), st.sampled_from(SHARES), st.booleans(), st.integers(0, 1 << 20))
def test_those_whose_bits_differ(form, share, is_block, seed):
    random = torch.Generator().manual_seed(seed)
    before = torch.randint(256, (form.size,), dtype=torch.uint8, generator=random)
    now = torch.randint(256, (form.size,), dtype=torch.uint8, generator=random)  # what fills it up differs
    begin = 0
    for width, first, last in form.parts:
        count = last - first
        if is_block:  # elements that follow one another
            some = torch.zeros(count, dtype=torch.bool)
            some[: int(share * count)] = True
        else:
            some = torch.rand(count, generator=random) < share
        rows = slice(begin, begin + width * count)
        now[rows].view(-1, width)[~some] = before[rows].view(-1, width)[~some]
        begin = rows.stop
    expected, sent = by_element(now, before, form), before.clone()
    numbers = changed(now, before, form)
    if numbers is None:
        # A sample may be wrong by a little, in messages of which much changed.
        assert 1.3 * size_of(torch.tensor(expected, dtype=torch.int64), form) >= form.size
        return
    assert numbers.tolist() == expected
    assert not is_longer(size_of(numbers, form), form)
    pack(numbers, now, sent, form)
    end = form.size if not form.elements else begin
    assert sent[:end].equal(now[:end])


@pytest.mark.parametrize("width", BY_WIDTH)
def test_one_element_of_many(width):
    """The first, the last and each of the first words, alone."""
    form = Form((width,), (4099,))
    before = torch.zeros(form.size, dtype=torch.uint8)
    for element in (*range(20), 4090, 4098):
        now = before.clone()
        now[element * width + width - 1] = 1
        assert changed(now, before, form).tolist() == [element]
