"""The layout that vLLM's loader loads a layer into, where it serves another one, and the step between them.

vLLM keeps the loader's layout of each layer, as tensors on meta, for its layerwise reload. So the loader can be asked
where each tensor goes there, a layer can be filled with slices, and vLLM's own function makes of it what it serves.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch

from torch_overlay.loading.loader_run import set_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

_RELOAD = "vllm.model_executor.model_loader.reload"


class Layouts:
    """What is used of vLLM's reload. Raises an ImportError or an AttributeError where a vLLM lacks some of it."""

    def __init__(self) -> None:
        steps: Any = importlib.import_module(f"{_RELOAD}.layerwise")
        meta: Any = importlib.import_module(f"{_RELOAD}.meta")
        self._info, self._process = steps.get_layerwise_info, steps._layerwise_process
        self._loader_of = steps._get_original_loader
        self._restore, self._to_meta = meta.restore_layer_on_meta, meta.to_meta_tensor
        # Attention, whose own weights are made at the end of a reload. Up to 0.30 its classes are named there.
        is_deferred = getattr(steps, "is_deferred_attention_layer", None)
        kinds = () if is_deferred is not None else (steps.Attention, steps.MLAAttention)
        self.is_deferred: Callable[[torch.nn.Module], bool] = is_deferred or (lambda layer: isinstance(layer, kinds))
        # Tensors that loaders read, such as maps of experts.
        self._kept = getattr(meta, "SKIP_LOAD_TENSORS", {"_expert_map"})
        self._biases: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}  # on meta

    def has(self, module: torch.nn.Module) -> bool:
        """True if a layer can be put into the loader's layout, and be processed alone."""
        return (
            getattr(module, "quant_method", None) is not None
            and not self.is_deferred(module)
            and bool(self._info(module).restore_metadata[0])
        )

    @contextlib.contextmanager
    def of_loader(self, modules: Iterable[torch.nn.Module], tied: Collection[int]) -> Iterator[None]:
        """Put these layers into the loader's layout, on meta, for a block; not parameters tied to others, by id."""
        saved = [(module, _tables(module), {*module._non_persistent_buffers_set}) for module in modules]
        try:
            for module, (parameters, _), _ in saved:
                self._restore(module, self._info(module))
                for name, tensor in [*module._parameters.items()]:
                    if id(parameters.get(name)) in tied:
                        module._parameters[name] = parameters[name]
                    elif tensor is not None and name not in self._kept:
                        # A bias, which vLLM leaves where it is, is changed in place by some steps.
                        if not tensor.is_meta:
                            tensor = self._biases.setdefault((module, name), self._to_meta(tensor))
                        module._parameters[name] = tensor
                        if hasattr(tensor, "weight_loader"):  # which may be wrapped, to remember what it loads
                            tensor.weight_loader = self._loader_of(tensor)
            yield
        finally:
            for module, (parameters, buffers), passing in saved:
                set_table(module, "_parameters", parameters)
                set_table(module, "_buffers", buffers)
                module._non_persistent_buffers_set = passing

    def process(self, module: torch.nn.Module, served: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Have vLLM make what it serves of a layer that was loaded, into the tensors that it served before."""
        info = self._info(module)
        info.kernel_tensors = served
        info.kernel_non_persistent_buffers = {*module._non_persistent_buffers_set}
        try:
            self._process(module, info)
        finally:
            info.reset()


def _tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**module._parameters}, {**module._buffers}


def served_by(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    tables = [{name: each for name, each in table.items() if each is not None} for table in _tables(module)]
    return tables[0], tables[1]
