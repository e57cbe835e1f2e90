"""A dispatch mode that a test's threads have left is off for the next test."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import modes


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def test_torch_compiles_after_threads_that_left_a_mode_in_the_order_in_which_they_entered_it():
    ranks = [(ThreadPoolExecutor(1), Through()) for _ in range(2)]
    for thread, mode in ranks:
        thread.submit(mode.__enter__).result()
    for thread, mode in ranks:
        thread.submit(mode.__exit__, None, None, None).result()
        thread.shutdown()
    modes.none_is_on()
    compiled = CompileCounter()
    torch.compile(torch.sin, backend=compiled)(torch.ones(2))
    assert compiled.frame_count == 1


def test_a_mode_that_is_on_stays_so():
    with Through():
        modes.none_is_on()
        assert torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
