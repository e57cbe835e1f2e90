"""The worker's side: tensors of a checkpoint go straight into the boxes of the model where its loader puts them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import torch_overlay

from .landings import Landings, Meta, beside, keys, landings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.transfers.place import Place

logger = logging.getLogger("torch_overlay")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker has to know; the trainer's engine sends it.

    Attributes:
        address: where all meet, "tcp://host:port" of the first trainer. The key, if there is one, is in each process's
            environment (TORCH_OVERLAY_MEET_KEY), and never sent.
        trainers, workers: how many there are; workers are numbered after the trainers.
        timeout: seconds that they wait for one another.
        budget: bytes that buffers may take on a rank.
        params: name, type and shape of each tensor of the checkpoint.
    """

    address: str
    trainers: int
    workers: int
    timeout: float
    budget: int
    params: list[Sequence[Any]] = field(default_factory=list)

    @property
    def metas(self) -> list[Meta]:
        """Raises ValueError for a type that torch doesn't have."""
        found = []
        for name, dtype, shape in self.params:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"The trainer says that {name!r} is of type {dtype!r}, which is no type of torch's.")
            found.append(Meta(name, getattr(torch, dtype), tuple(shape)))
        return found


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Of one round: nothing; all tensors come."""


class WorkerEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives each round's weights in place.

    What the loader only cuts is written where it belongs, each worker getting its own part. What it calculates with,
    and all of a model that is quantized or has layers whose weights vLLM lays out anew after loading, comes whole and
    goes through `load_weights`.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._place: Place | None = None
        self._transfer: torch_overlay.Transfer | None = None
        self._found = Landings({}, {})
        self._whole: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainers and plan; called once on each worker, while the trainers' engines are made."""
        if self._transfer is not None:
            raise RuntimeError("The engine 'torch_overlay' is initialized already; shut it down before.")
        try:
            self._join(init_info)
        except BaseException:
            self.shutdown()
            raise

    def _join(self, init_info: InitInfo) -> None:
        metas = init_info.metas
        self._found = self._landings(metas)
        self._whole = {
            meta.name: torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in metas
            if meta.name in self._found.whole
        }
        self._say(metas)
        size = init_info.trainers + init_info.workers
        rank = init_info.trainers + worker_number(self.parallel_config)
        self._place = torch_overlay.meet(init_info.address, rank=rank, world_size=size, timeout=init_info.timeout)
        shapes = {meta.name: meta.shape for meta in metas}
        target: dict[str, Any] = dict(self._whole)
        for name, boxes in self._found.direct.items():
            target[name] = tuple([torch_overlay.piece(view, shapes[name], start) for start, view in boxes])
        self._transfer = torch_overlay.Transfer(None, target, group=self._place, budget=init_info.budget, strict=False)

    def _landings(self, metas: list[Meta]) -> Landings:
        if getattr(self.model_config, "quantization", None) is not None:
            return Landings({}, {meta.name: "the model is quantized" for meta in metas})
        found = landings(self.model.load_weights, self.model, metas)  # type: ignore[operator, arg-type]
        anew = [keys(module) for module in self.model.modules() if lays_out_anew(module)]
        written = set().union(*anew)
        written |= found.without(written, "vLLM makes something of it after loading")
        params = (*self.model.parameters(), *self.model.buffers())
        away = {tensor.untyped_storage()._cdata for tensor in params if tensor.device.type != self.device.type}
        written |= found.without(away, f"it belongs to another device than {self.device}")
        beside(found, self.model, written)
        return found

    def _say(self, metas: list[Meta]) -> None:
        size = {meta.name: math.prod(meta.shape) * meta.dtype.itemsize for meta in metas}
        whole = sum([size[name] for name in self._found.whole])
        direct = sum([view.nbytes for boxes in self._found.direct.values() for _, view in boxes])
        logger.info(
            "%d of %d tensors (%d bytes) go straight into this worker's model; %d (%d bytes) come whole",
            *(len(self._found.direct), len(metas), direct, len(self._found.whole), whole),
        )
        for name, why in self._found.whole.items():
            logger.debug("%s comes whole: %s", name, why)

    def start_weight_update(self) -> None:
        """Prepare vLLM's reloading, if something comes whole."""
        if self._whole:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in one run of the transfer; raises as `Transfer.run` does."""
        if self._transfer is None:
            raise RuntimeError("The engine 'torch_overlay' isn't initialized: init_transfer_engine comes first.")
        self._transfer.run()
        if self._whole:
            self.model.load_weights(self._whole.items())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Let vLLM finish its reloading, if something came whole."""
        if self._whole:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainers. Again does nothing."""
        transfer, self._transfer = self._transfer, None
        place, self._place = self._place, None
        self._found, self._whole = Landings({}, {}), {}
        for each in (transfer, place):
            if each is not None:
                each.close()


def worker_number(parallel: Any) -> int:
    """Of this worker among those of all engines: data-parallel replicas one after the other."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


def lays_out_anew(module: torch.nn.Module) -> bool:
    """Whether vLLM may make something of a module's weights after it loaded them, in another layout or another place:
    a method that isn't one of those that leave them as they are, or the module itself (attention with latent heads)."""
    method = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if kind == "UnquantizedFusedMoEMethod":
        return getattr(getattr(method, "unquantized_backend", None), "name", None) not in ("TRITON", "BATCHED_TRITON")
    known = method is None or kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    return not known or hasattr(module, "process_weights_after_loading")
