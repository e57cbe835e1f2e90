"""`DTensorSource`: a trainer's weights, sent as its ranks hold them, without gathering."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from torch_overlay.transfers.loader_run import Meta
from torch_overlay.transfers.trees import names_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    Called = str | tuple[str, ...] | None


class DTensorSource:
    """A trainer's weights, sent as its ranks hold them: DTensors in any placement, strided shards of FSDP2 x TP
    included, and plain tensors that all ranks have. Nothing is gathered.

    Use it in place of vLLM's `ModuleSource`, which calls `full_tensor()` on what it can't describe: under FSDP2 x TP on
    10 of the 25 tensors of a model of two layers. Needs no vLLM.

    Args:
        weights: a module, whose parameters are sent; or a mapping of tensors; or a function that returns one, such as
            `model.state_dict`. It is read in each round. All ranks have the same names.
        names: maps a name of the trainer's to the tensor's name in a checkpoint, to a tuple of several, or to None if
            it isn't to be sent. A function, or a dict of the names that differ.

    >>> import torch
    >>> from torch_overlay.integrations.vllm.source import DTensorSource
    >>> source = DTensorSource(torch.nn.Linear(2, 3), names={"weight": "lm_head.weight", "bias": None})
    >>> [(meta.name, meta.shape) for meta in source.metadata]
    [('lm_head.weight', (3, 2))]
    """

    def __init__(
        self,
        weights: torch.nn.Module | Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        names: Callable[[str], Called] | Mapping[str, Called] | None = None,
    ) -> None:
        self._weights, self._names = weights, names

    @cached_property
    def metadata(self) -> list[Meta]:
        """Name, type and global shape of each tensor, under its name in a checkpoint."""
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors().items()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors as they are now, detached, under their names in a checkpoint."""
        if isinstance(self._weights, torch.nn.Module):
            weights: Mapping[str, torch.Tensor] = dict(self._weights.named_parameters())
        else:
            weights = self._weights() if callable(self._weights) else self._weights
        found: dict[str, torch.Tensor] = {}
        for path, tensor in weights.items():
            for name in names_for(path, self._names, may_skip=True):
                if name in found:
                    raise ValueError(f"Two tensors of the trainer are called {name!r}; names= gives both this name.")
                found[name] = tensor.detach()
        return found

    def implements_iter_full(self) -> bool:
        """Return True: vLLM's own engines can use this source, too, and then gather each tensor."""
        return True

    def implements_iter_local(self) -> bool:
        """Return False: vLLM's `iter_local` can't describe strided shards. Our engine calls `tensors` instead."""
        return False

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs of a name and the gathered tensor, for vLLM's own engines. Collective, as `full_tensor` is.
        Raises as `tensors`."""
        for name, tensor in self.tensors().items():
            full: Any = getattr(tensor, "full_tensor", None)
            yield name, tensor if full is None else full()
