"""The demo's counters count what they say: each collective once, whoever asks for it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from torch_overlay.demo.counters import count_collectives


@pytest.fixture
def world():
    """A gloo world of this process alone, gone afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_result_is_passed_on(world):
    assert count_collectives(lambda: 7) == (7, {})


def test_collectives_of_c10d_are_counted(world):
    x = torch.ones(4)

    def call():
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(4), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_to_all_single(torch.empty(4), x)
        dist.broadcast(x, 0)

    expected = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}
    assert count_collectives(call)[1] == expected


def test_functional_collectives_are_counted_once_and_backward_too(world):
    x = torch.ones(4, requires_grad=True)

    def call():
        there = functional.all_to_all_single_autograd(x, [4], [4], world)
        there.sum().backward()

    assert count_collectives(call)[1] == {"all-to-all": 2}
    assert count_collectives(lambda: functional.all_reduce(x.detach(), "sum", world).sum())[1] == {"all-reduce": 1}
