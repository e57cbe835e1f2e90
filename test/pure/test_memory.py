"""Memory that views share, against sets of addresses; and what a transfer would overwrite, element by element."""

import itertools
import random

import pytest

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.transfers._planner import memory
from torch_overlay.transfers._planner.memory import HeldBox, Memory, Shared


def places(view):
    """The address of each element's first byte, row-major."""
    ranges = [range(length) for length in view.length]
    return [view.address + sum(s * i for s, i in zip(view.stride, at)) for at in itertools.product(*ranges)]


def addresses(view):
    return {at + byte for at in places(view) for byte in range(view.itemsize)}


def any_memory(rng, most=24):
    dims, itemsize = rng.randint(0, 3), rng.choice((1, 1, 2, 4))
    length = tuple(rng.randint(1, 4) for _ in range(dims))
    stride = tuple(itemsize * rng.randint(0, 9) for _ in range(dims))
    return Memory(rng.randrange(most) * itemsize, length, stride, itemsize)


def test_shared_bytes_are_those_of_sets_of_addresses():
    rng, found = random.Random(0), [0, 0]
    for _ in range(6_000):
        one, other = any_memory(rng), any_memory(rng)
        shares = bool(addresses(one) & addresses(other))
        assert one.shares_bytes(other) == shares, (one, other)
        assert one.end == max(addresses(one)) + 1
        found[shares] += 1
    assert min(found) > 1_000


def test_views_too_odd_to_look_through_count_as_sharing(monkeypatch):
    one, other = Memory(0, (3, 3), (14, 6), 1), Memory(5, (3, 2), (10, 4), 1)
    assert not one.shares_bytes(other)
    monkeypatch.setattr(memory, "TRIED", 0)
    assert one.shares_bytes(other)


def window(rng, shape):
    """A part of a whole tensor in one of two storages, with strides of the whole or of its own."""
    ends = [sorted(rng.sample(range(n + 1), 2)) for n in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    itemsize = 4
    strides = (shape[1] * itemsize, itemsize) if rng.random() < 0.7 else (itemsize, shape[0] * itemsize)
    origin = 4096 + (0 if rng.random() < 0.6 else itemsize * rng.randrange(8))
    if rng.random() < 0.3:  # a tensor of its own, as a shard is
        strides, at = (box.length[1] * itemsize, itemsize), origin
    else:
        at = origin + sum(s * i for s, i in zip(strides, box.start))
    stride = tuple(s if n > 1 else rng.choice((s, 999)) for s, n in zip(strides, box.length))
    return HeldBox(rng.choice("ab"), "float32", box, Memory(at, box.length, stride, itemsize))


def elements(part):
    """By element of the whole, its address."""
    ranges = [range(start, start + length) for start, length in zip(*part.box)]
    return dict(zip(itertools.product(*ranges), places(part.memory), strict=True))


def test_a_source_is_overwritten_if_a_byte_is_written_that_is_another_element_of_it():
    rng, found = random.Random(1), [0, 0]
    for _ in range(4_000):
        source, target = window(rng, (3, 4)), window(rng, (3, 4))
        old, new = elements(source), elements(target)
        in_place = {k for k in new if source.name == target.name and old.get(k) == new[k]}
        written = {new[k] + byte for k in new if k not in in_place for byte in range(4)}
        wrong = bool(written & addresses(source.memory))
        said = bool(Shared.of({3: source}, {5: target}).overwritten)
        assert said or not wrong, (source, target)  # what isn't copied must be right
        assert wrong or not said or bool(addresses(source.memory) & addresses(target.memory)), (source, target)
        if source.name == target.name and old == new:
            assert said == wrong, (source, target)  # what is in place isn't copied
        found[wrong] += 1
    assert min(found) > 500


def part(name, start, address, length=(2, 4), stride=(16, 4), dtype="float32"):
    return HeldBox(name, dtype, Box(start, length), Memory(address, length, stride, 4))


def test_equal_blocks_of_two_names_are_tied_and_others_clash():
    one, tied, above = part("a", (0, 0), 64), part("b", (0, 0), 64), part("c", (0, 0), 80)
    assert Shared.of({}, {0: one, 1: tied}) == Shared({}, [], [("a", "b")])
    assert Shared.of({}, {0: one, 1: above}).clashes == [("a", "c")]
    assert Shared.of({}, {0: one, 1: part("b", (1, 0), 64)}).clashes == [("a", "b")]
    assert Shared.of({}, {0: one, 1: part("b", (0, 0), 64, dtype="int32")}).clashes == [("a", "b")]
    assert Shared.of({}, {0: one, 1: part("a", (4, 0), 64)}).clashes == [("a", "a")]
    assert Shared.of({}, {0: one, 1: part("b", (0, 0), 96)}) == Shared({}, [], [])


def test_pieces_of_one_tensor_may_overlap_in_place():
    assert Shared.of({}, {0: part("a", (0, 0), 64), 1: part("a", (1, 0), 80)}) == Shared({}, [], [])


def test_experts_that_change_places_are_overwritten_by_one_another():
    sources = {n: part("w", (2 * n, 0), 64 + 32 * n) for n in range(4)}
    targets = {n: part("w", (2 * to, 0), 64 + 32 * n) for n, to in enumerate((0, 2, 1, 5))}
    assert Shared.of(sources, targets).overwritten == {1: {1}, 2: {2}, 3: {3}}  # the first one stays


@pytest.mark.parametrize("count", [3_000])
def test_only_neighbours_are_compared(count, monkeypatch):
    asked = []
    plain = HeldBox.lies_alike
    monkeypatch.setattr(HeldBox, "lies_alike", lambda one, other: asked.append(1) or plain(one, other))
    parts = {n: part("w", (2 * n, 0), 64 + 32 * n) for n in range(count)}
    assert Shared.of(parts, parts).overwritten == {}
    assert len(asked) == count
