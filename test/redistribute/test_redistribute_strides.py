"""Where stock's result is contiguous ours is, in the order of strides that stock's has, and in memory that it shares.

Even shards only: of uneven ones stock's own steps leave views into their padding, whose strides say how it was padded.
"""

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import torch_overlay
from mesh_harness import fake_world
from way import needs_package
from width import sample

pytestmark = needs_package
PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
LENGTH = 8
META = TensorMeta(torch.Size((LENGTH, LENGTH)), (LENGTH, 1), torch.float32)


@pytest.fixture(autouse=True)
def overlay_on():
    """In place of the one for all tests here: these turn it on themselves."""


def row_major(shape):
    return torch.zeros(shape)


def column_major(shape):
    return torch.zeros(shape[::-1]).t()


def with_gaps(shape):
    return torch.zeros(shape[0], shape[1] + 3)[:, : shape[1]]


def pairs(count):
    """All but those that torch has no steps for: a shard doesn't become a term of a sum before 2.14."""
    for source, target in itertools.product(itertools.product(PLACEMENTS, repeat=count), repeat=2):
        if source != target and not any(new == "P" != old != "R" for old, new in zip(source, target, strict=True)):
            yield source, target


def results(sizes, make, first=0):
    """By pair: strides, contiguous or not, and whether the result's memory is the input's."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    found = {}
    for source, target in sample(pairs(len(sizes)), 5 if len(sizes) > 2 else 1, first):
        cuts = [math.prod(size for size, name in zip(sizes, source) if name == dim) for dim in ("S0", "S1")]
        local = make(tuple(LENGTH // parts for parts in cuts))
        ends = [DTensorSpec(mesh, tuple(PLACEMENTS[name] for name in end), META) for end in (source, target)]
        result = torch_redistribute.redistribute_local_tensor(local, *ends)
        shared = result.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        found[source, target] = (result.stride(), result.is_contiguous(), shared)
    return found


MAKES = [row_major, column_major, with_gaps]


SIZES = [(1,), (2,), (4,), (2, 2), (1, 2), (2, 1), (1, 1), (1, 2, 2), (2, 1, 2)]


@pytest.mark.parametrize("sizes, make", list(sample(itertools.product(SIZES, MAKES), 2)))
def test_results_lie_in_memory_as_stocks_do(sizes, make):
    world = math.prod(sizes)
    with torch.no_grad(), fake_world(world - 1, world):
        first = MAKES.index(make)
        stock = results(sizes, make, first)
        with torch_overlay.enabled():
            ours = results(sizes, make, first)
    assert len(stock) > 8
    assert {pair: (stock[pair], ours[pair]) for pair in stock if stock[pair] != ours[pair]} == {}
