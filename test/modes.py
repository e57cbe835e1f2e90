"""Whether torch thinks that a dispatch mode is on."""

import sys


def none_is_on() -> None:
    """Make torch think so where none is.

    It keeps that in globals, where each mode puts back what it found. Of ranks that are threads, one that leaves a mode
    after the one that entered first puts back that a mode is on; from then on, before 2.11, torch compiles nothing.
    """
    torch, dispatch = sys.modules.get("torch"), sys.modules.get("torch.utils._python_dispatch")
    if torch is None or dispatch is None or torch._C._len_torch_dispatch_stack():
        return
    for name, value in vars(dispatch).items():
        if name.startswith("_is_in_") and value is True:
            setattr(dispatch, name, False)
