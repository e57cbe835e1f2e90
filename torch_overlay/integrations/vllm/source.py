"""A trainer's weights, each as it lies on the trainer's ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from torch_overlay.transfers.descriptions import names_for
from torch_overlay.transfers.landings import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    Called = str | tuple[str, ...] | None


class DTensorSource:
    """Weights of a trainer that are sent as they lie: DTensors in any placement, FSDP2 x TP's strided shards included,
    and plain tensors, which each rank has. Nothing is gathered. It takes the place of vLLM's `ModuleSource`, which
    gathers what it can't describe, and needs no vLLM.

    Args:
        weights: a module, of which the parameters are sent, or a mapping of tensors, or a function that returns one, as
            `model.state_dict`. Read in each round. All ranks have the same names.
        names: from a name of the trainer's to the name that the tensor has in a checkpoint, or a tuple of several, or
            None for one that isn't sent: a function, or a dict of those that differ.

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
        """The tensors of now, under their names in a checkpoint.

        Raises:
            ValueError: two have one name.
        """
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
        """Whole tensors are for other engines, which gather them."""
        return True

    def implements_iter_local(self) -> bool:
        """vLLM's words can't describe what lies here; the engine `torch_overlay` asks for `tensors`."""
        return False

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor gathered, for engines of vLLM's."""
        for name, tensor in self.tensors().items():
            full: Any = getattr(tensor, "full_tensor", None)
            yield name, tensor if full is None else full()
