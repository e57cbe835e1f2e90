"""The trainer's side: each rank sends its own pieces, as `WeightSource.iter_local` gives them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch_overlay
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.transfer import BUDGET
from torch_overlay.transfers._planner.sides import Ranks

from . import BACKEND, require

require("trainer")  # before vLLM's names, of which an older one has only some

from vllm.distributed.weight_transfer.base import (  # noqa: E402
    Shard,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch_overlay.transfers.meeting import Place


@dataclass(kw_only=True)
class TrainerInfo(TrainerInitInfo):
    """What a trainer's rank says of itself and of the others.

    Attributes:
        rank: of this trainer, from 0.
        address: where all meet, "tcp://host:port": the first trainer listens there, and nowhere else.
        trainers, workers: how many there are; workers of all data-parallel replicas together.
        timeout: seconds that they wait for one another.
        budget: bytes that buffers may take on a rank.
    """

    backend: ClassVar[str] = BACKEND

    address: str
    trainers: int
    workers: int
    timeout: float = 300.0
    budget: int = BUDGET

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.trainers or self.workers < 1:
            raise ValueError(
                f"A trainer has a rank from 0 to {self.trainers - 1} and sends to workers; got rank {self.rank} of "
                f"{self.trainers} and {self.workers} workers."
            )


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """Sends each round's weights, each element once to each worker that lacks it."""

    init_info_cls = TrainerInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, rank: int) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender, rank=rank)
        self._place: Place | None = None
        self._transfer: torch_overlay.Transfer | None = None
        self._trainers = 1

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> TrainerEngine:
        """Meet the workers and plan; called on each trainer's rank.

        Raises:
            ValueError: there is no source, or it has no `iter_local`.
            RuntimeError: somebody didn't come within the timeout; says who. Or what the workers raised.
        """
        if source is None or not source.implements_iter_local():
            raise ValueError("The engine 'torch_overlay' needs a WeightSource that has iter_local.")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._trainers = init_info.trainers
        params = [(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)) for meta in source.metadata]
        said = {"address": init_info.address, "trainers": init_info.trainers, "workers": init_info.workers}
        said |= {"timeout": init_info.timeout, "budget": init_info.budget, "params": params}

        def join() -> None:
            size = init_info.trainers + init_info.workers
            engine._place = torch_overlay.meet(
                init_info.address, rank=init_info.rank, world_size=size, timeout=init_info.timeout
            )
            pieces = engine._pieces()
            engine._transfer = torch_overlay.Transfer(
                pieces, None, group=engine._place, budget=init_info.budget, strict=False
            )

        try:
            engine._beside(lambda: client.init_weight_transfer_engine(said), join)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def send_weights(self) -> None:
        """One round: the source's weights of now, into all workers. Called on each trainer's rank.

        Raises:
            ValueError: on all trainers and workers, before anything is sent: another trainer's source failed; says
                whose and how. On the one that failed, its own error. The next round is as any.
            RuntimeError: a rank didn't come within the timeout, or the engine was shut down. Or, on all trainers before
                anything is sent, the servers didn't let the sender start; on the sender, its client's error.
        """
        if self._transfer is None:
            raise RuntimeError("The engine 'torch_overlay' was shut down.")
        transfer = self._transfer
        self._start()

        def send() -> None:
            try:
                transfer.bind(source=self._pieces())
            except Exception as error:
                transfer.refuse(f"{type(error).__name__}: {error}")
                raise
            except BaseException:  # interrupted
                self.shutdown()
                raise
            transfer.run()

        self._beside(lambda: self.client.update_weights({}), send)
        if self.is_sender:
            self.client.finish_weight_update()

    def _start(self) -> None:
        """Begin a round at the workers, which the sender alone calls: what it is told there, the other trainers hear of
        it. They would wait in the transfer for workers that nobody has called."""
        failed: Exception | None = None
        if self.is_sender:
            try:
                self.client.start_weight_update()
            except Exception as error:
                failed = error
        if self._trainers > 1:
            what, hint = "A round of weights", "Each rank of the trainer calls send_weights in each round."
            meeting = self._place.meeting(what, range(self._trainers), hint)  # type: ignore[union-attr]
            said = meeting.say("" if failed is None else f"{type(failed).__name__}: {failed}")
            why = next(filter(None, said.values()), "")
            if why and failed is None:
                raise RuntimeError(
                    "A round of weights needs the sender, rank 0 of the trainer, to start it at vLLM's servers, and "
                    f"they failed it: {why.removesuffix('.')}. Nothing was sent; see to the servers, and send again."
                )
        if failed is not None:
            raise failed

    def shutdown(self) -> None:
        """Leave the workers. Again does nothing."""
        transfer, self._transfer = self._transfer, None
        place, self._place = self._place, None
        for each in (transfer, place):
            if each is not None:
                each.close()

    def _beside(self, call: Callable[[], object], work: Callable[[], None]) -> None:
        """Work while the workers do what the sender calls for; what they raise is the reason for what fails here."""
        if not self.is_sender:
            work()
            return
        failed: Exception | None = None
        with ThreadPoolExecutor(1, "torch_overlay vllm") as pool:
            called: Future[object] = pool.submit(call)
            try:
                work()
            except Exception as error:
                failed = error
        if failed is not None and called.exception() is None:
            raise failed
        if failed is not None:
            raise called.exception() from failed  # type: ignore[misc]
        called.result()

    def _pieces(self) -> dict[str, Any]:
        metas = {meta.name: meta for meta in self.source.metadata}  # type: ignore[union-attr]
        return {name: self._piece(metas[name], tensor) for name, tensor in self.source.iter_local()}  # type: ignore[union-attr]

    def _piece(self, meta: Any, tensor: Any) -> Any:
        """What this rank has of a tensor: its owners' mesh cuts it as torch.chunk does."""
        start = (0,) * len(meta.shape)
        if meta.placements is not None:
            dims = [placement.dim if isinstance(placement, Shard) else None for placement in meta.placements]
            regions = Regions.of(dims, [None] * len(dims), meta.shape, meta.mesh_shape)
            coordinate = Ranks.of(meta.owners, meta.mesh_shape).coordinate(self.rank)
            start = regions.box(coordinate).start  # type: ignore[arg-type]
        return torch_overlay.piece(tensor.detach(), meta.shape, start)
