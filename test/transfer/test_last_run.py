"""What the next run of a `Transfer` takes for unchanged, and how the blocks of one direction are grouped."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from torch_overlay.transfers._planner.memory import NOTHING_SHARED
from torch_overlay.transfers.blocks import Block, in_groups
from torch_overlay.transfers.bound_tensors import LastRun
from torch_overlay.transfers.pieces import Plain


def replace(plain, local):
    plain._local_tensor = local.clone()


def set_data(make):
    def change(plain, local):
        local.data = make(local)

    return change


def resize_storage(plain, local):
    """Until the same address comes back with fewer bytes, as an offload may leave it."""
    address, storage = local.data_ptr(), local.untyped_storage()
    size = storage.nbytes()
    for less in range(1, size):
        storage.resize_(0)
        storage.resize_(size - less)
        if local.data_ptr() == address:
            return
    pytest.skip("the allocator gave other memory each time")


CHANGES = {
    "another tensor": replace,
    "another layout": lambda plain, local: setattr(plain, "_spec", object()),
    "other memory": set_data(torch.clone),
    "other memory of its storage": set_data(lambda local: local.as_strided((4, 4), (4, 1), 4)),
    "another storage there": set_data(lambda local: torch.from_numpy(local.numpy())),
    "other strides": set_data(torch.t),
    "other shape": set_data(lambda local: local[:3]),
    "other type": set_data(lambda local: local.view(torch.float64)),
    "conjugate": set_data(torch.conj),
    "negative": set_data(torch._neg_view),
    "offloaded": lambda plain, local: local.untyped_storage().resize_(0),
    "smaller": resize_storage,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_every_change_of_a_tensor_is_seen(change, dtype):
    if change in ("conjugate", "negative") and not dtype.is_complex:
        pytest.skip("of complex numbers alone")
    locals_ = [torch.arange(20).reshape(5, 4).to(dtype)[:4].data for _ in range(3)]
    plains = [*map(Plain, locals_)]
    last = LastRun([SimpleNamespace(_tensor=plain) for plain in plains], locals_, [], NOTHING_SHARED)
    assert last.is_unchanged()
    locals_[1].fill_(7)
    assert last.is_unchanged(), "values may change"
    CHANGES[change](plains[1], locals_[1])
    assert not last.is_unchanged()


def test_a_view_of_a_tensor_whose_memory_was_replaced_is_seen():
    whole = torch.zeros(8)
    part = whole[:4]
    last = LastRun([SimpleNamespace(_tensor=Plain(part))], [part], [], NOTHING_SHARED)
    assert last.is_unchanged()
    whole.data = torch.zeros(8)
    assert not last.is_unchanged()


def test_what_is_waited_for_or_copied_in_each_run_is_never_unchanged():
    value = torch.zeros(4, dtype=torch.complex64)
    for local in (AsyncCollectiveTensor(value), value.conj(), value.conj().imag):
        last = LastRun([SimpleNamespace(_tensor=Plain(local))], [value], [], NOTHING_SHARED)
        assert not last.is_unchanged()


def test_a_gpu_copies_dense_blocks_of_equal_types_together():
    """Meta tensors stand for those of a GPU. Each block is copied once, to its own place."""
    kinds = [(torch.float32, torch.bfloat16, True), (torch.int16, torch.int16, True), (torch.int16, torch.int16, False)]
    blocks, own, other = [], [], []
    for number in range(12):
        one, two, is_dense = kinds[number % 3]
        blocks.append(Block(number, (6,), (1,) if is_dense else (2,), 0))
        own.append(torch.empty(12, dtype=one, device="meta")[:: 1 if is_dense else 2][:6])
        other.append(torch.empty(6, dtype=two, device="meta"))
    groups = in_groups(blocks, own, other)
    assert len(groups) == 3
    pairs = [(id(one), id(two)) for some in groups for one, two in zip(*some, strict=True)]
    assert sorted(pairs) == sorted(zip(map(id, own), map(id, other)))
    for some, _ in groups:
        assert len({(view.dtype, view.stride()) for view in some}) == 1
