"""The worker's side: tensors of a checkpoint go straight into the boxes of the model where its loader puts them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import torch_overlay
from torch_overlay.transfers.meeting import refuse_transfer

from . import require
from .landings import Landings, Meta, beside, keys, landings, refusal

require("worker")  # before vLLM's names, of which an older one has only some

from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.transfers.meeting import Place

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
        self._reloads = False  # vLLM's reload has begun, and parameters are on meta

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
        problem: Exception | None = None
        try:
            metas = self._prepare(init_info)
        except Exception as error:
            problem = error
        size = init_info.trainers + init_info.workers
        rank = init_info.trainers + worker_number(self.parallel_config)
        try:
            # With a problem, too: the trainers and the other workers would wait for this one for the whole timeout.
            self._place = torch_overlay.meet(init_info.address, rank=rank, world_size=size, timeout=init_info.timeout)
            if problem is not None:
                refuse_transfer(self._place, str(problem))
        finally:
            if problem is not None:
                raise problem
        shapes = {meta.name: meta.shape for meta in metas}
        target: dict[str, Any] = dict(self._whole)
        for name, boxes in self._found.direct.items():
            target[name] = tuple([torch_overlay.piece(view, shapes[name], start) for start, view in boxes])
        self._transfer = torch_overlay.Transfer(None, target, group=self._place, budget=init_info.budget, strict=False)

    def _prepare(self, init_info: InitInfo) -> list[Meta]:
        """Ask the loader where the trainer's tensors land, and make room for those that come whole."""
        self._check_experts_stay()
        metas = init_info.metas
        self._found = self._landings(metas)
        self._whole = {
            meta.name: torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in metas
            if meta.name in self._found.whole
        }
        self._say(metas)
        return metas

    def _check_experts_stay(self) -> None:
        """ValueError if vLLM moves experts between workers: where weights land is asked once, and after a move they
        would be written over other experts."""
        if getattr(self.parallel_config, "enable_eplb", False):
            raise ValueError(
                "The engine 'torch_overlay' needs experts that stay on their workers, and this server has enable_eplb, "
                "which moves them. Start it without, or take another weight transfer backend."
            )

    def _landings(self, metas: list[Meta]) -> Landings:
        if getattr(self.model_config, "quantization", None) is not None:
            return Landings({}, {meta.name: "the model is quantized" for meta in metas})
        found = landings(self.model.load_weights, self.model, metas)  # type: ignore[operator, arg-type]
        anew = [keys(module) for module in self.model.modules() if lays_out_anew(module)]
        refused = refusal(self.model.load_weights, self.model, metas, found)  # type: ignore[operator, arg-type]
        if refused is not None and anew:
            # Of a layer in another layout than its loader's nobody knows: vLLM's reload gives it the loader's again.
            logger.warning("the model's load_weights %s; it is asked again in each round", refused)
        elif refused is not None:
            raise ValueError(
                f"The engine 'torch_overlay' needs a model whose load_weights takes all {len(metas)} tensors of the "
                f"trainer, and that of {type(self.model).__name__} {refused}. Leave out of the trainer's source what "
                "this model doesn't have, or give it the name that it has in a checkpoint."
            )
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
        """Nothing: vLLM's reloading begins when all weights have come."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in one run of the transfer, and let the loader have what comes whole.

        Raises as `Transfer.run` and the model's `load_weights` do. vLLM's reloading, in which all parameters of the
        model are on meta, begins after the transfer and ends with an error of the loader: the server keeps what it had
        where a round is refused or fails.
        """
        if self._transfer is None:
            raise RuntimeError("The engine 'torch_overlay' isn't initialized: init_transfer_engine comes first.")
        self._transfer.run()
        if not self._whole:
            return
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._reloads = True
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(self._whole.items())  # type: ignore[operator]
        except BaseException:
            try:
                self.finish_weight_update()
            except Exception:  # the first error is the one to raise
                logger.exception("vLLM's reloading could not be finished after an error in it")
            raise

    def finish_weight_update(self) -> None:
        """Let vLLM finish its reloading, if that has begun."""
        reloads, self._reloads = self._reloads, False
        if reloads:
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
