"""Spans for the profiler, named by what is done. Where none is on they cost a look at a flag."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler as profiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Local = Callable[[torch.Tensor], torch.Tensor]


def span(what: str) -> contextlib.AbstractContextManager[object]:
    """A block of code as the profiler shows it. None under a mode: a tracer would take it for a part of the program."""
    if not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    return profiler.record_function(f"torch_overlay::{what}")


def spanned(what: str, functions: Sequence[Local]) -> tuple[Local]:
    """One function that calls these one after the other, in a span."""

    def run(local: torch.Tensor) -> torch.Tensor:
        with span(what):
            for function in functions:
                local = function(local)
        return local

    return (run,)
