"""The trainer's side: each rank sends what it holds of each tensor. Needs no vLLM on the trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch_overlay
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.transfer import BUDGET
from torch_overlay.transfers._planner.sides import Ranks
from torch_overlay.transfers.agreement import refuse_transfer

from . import BACKEND, MOVED, base_class, name_worker
from .servers import Servers
from .verification import share_findings

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from torch_overlay.rendezvous.place import Place


@dataclass(kw_only=True)
class TrainerInfo(base_class("TrainerInitInfo")):  # type: ignore[misc]
    """How a rank of the trainer meets the other trainers and vLLM's workers.

    Attributes:
        rank: this rank among the trainers, from 0.
        address: "tcp://host:port" of the first trainer, which listens there and nowhere else.
        trainers: how many ranks the trainer has.
        workers: how many workers there are, of all data-parallel replicas together; if `open`, of each server.
        timeout: seconds that they wait for one another.
        budget: bytes that buffers may take on a rank.
        changes: send only elements whose bits changed since the last round, as a `Transfer` does.
        relay: send each element from the trainers once, and let workers pass it on to one another. By default they do
            where the busiest machine's link then has fewer bytes, as in a `Transfer`.
        open: several servers come and go, each with all of its workers (`torch_overlay.meet`). The same on all
            trainers, as are the other options.
        at_least: if `open`, how many servers have to be there after a round.

    Raises:
        ValueError: the rank isn't from 0 to `trainers - 1`, or there is no worker.
    """

    backend: ClassVar[str] = BACKEND

    rank: int = field(kw_only=True)
    address: str
    trainers: int
    workers: int
    timeout: float = 300.0
    budget: int = BUDGET
    changes: bool | Literal["cpu"] = False
    relay: bool | None = None
    open: bool = False
    at_least: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.trainers or self.workers < 1:
            raise ValueError(
                f"A trainer has a rank from 0 to {self.trainers - 1} and sends to workers; got rank {self.rank} of "
                f"{self.trainers} and {self.workers} workers."
            )

    @property
    def is_sender(self) -> bool:
        """Whether this rank calls the servers."""
        return self.rank == 0


class TrainerEngine(base_class("TrainerWeightTransferEngine")):  # type: ignore[misc]
    """Sends the trainer's weights in each round: each element once to each worker that lacks it.

    vLLM 0.27 and newer makes one by its `WeightTransferTrainerFactory`. With an older vLLM, or without, call
    `trainer_init`. The constructor alone meets nobody.

    Args:
        client, source: as of `trainer_init`.
        is_sender: True on the rank that calls the servers.
        rank: this rank among the trainers.
    """

    init_info_cls = TrainerInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, rank: int) -> None:
        # Doesn't call the base class's constructor, whose arguments differ from release to release.
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank
        self._place: Place | None = None
        self._transfer: torch_overlay.Transfer | None = None
        self._trainers = 1
        self._options: dict[str, Any] = {}
        self._own_error: Exception | None = None  # of our source, in the last round in which it failed
        self._is_open = False

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> TrainerEngine:
        """Meet the workers, and plan the transfer. Every rank of the trainer calls it. On the sender, a thread calls
        the servers meanwhile.

        Args:
            init_info: of this rank.
            client: an `HTTPClient`, one of vLLM's (0.27 and newer), or anything with its methods
                `init_weight_transfer_engine`, `start_weight_update`, `update_weights` and `finish_weight_update`. Only
                the sender, rank 0, calls them. For a server of vLLM 0.24 to 0.26, its `start_weight_update` passes
                ``is_checkpoint_format=False``, as that of `HTTPClient` does. With ``info.open`` a list of clients, one
                for each server: those that answer are initialized when a round begins, also after a restart.
            source: a `DTensorSource`, or a `WeightSource` of vLLM 0.33 that has `iter_local`.

        Raises:
            ValueError: there is no source, or it has whole tensors only; or the weights don't fit the servers' models.
            RuntimeError: a rank didn't come within the timeout; names it. Or the workers raised; the message is theirs.
        """
        if not hasattr(source, "tensors") and not (
            hasattr(source, "implements_iter_local") and source.implements_iter_local()
        ):
            raise ValueError(
                "The engine 'torch_overlay' needs a source of what each rank holds: torch_overlay's DTensorSource, or "
                "a WeightSource that has iter_local, which vLLM's have from 0.33 on."
            )
        client = Servers(client, init_info.timeout / 3) if init_info.open and init_info.is_sender else client
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._is_open = init_info.open
        options = {"budget": init_info.budget, "changes": init_info.changes, "relay": init_info.relay}
        engine._trainers, engine._options = init_info.trainers, options
        params = [(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)) for meta in source.metadata]
        said = {"address": init_info.address, "trainers": init_info.trainers, "workers": init_info.workers}
        said |= {"timeout": init_info.timeout, **options, "params": params}

        def join() -> None:
            size = init_info.trainers + (0 if init_info.open else init_info.workers)
            engine._place = torch_overlay.meet(
                init_info.address,
                rank=init_info.rank,
                world_size=size,
                timeout=init_info.timeout,
                open=init_info.open,
            )
            engine._options["at_least"] = init_info.at_least
            engine._transfer = engine._planned(engine._weights())

        try:
            # The call returns when the workers have met us, and they wait for us to meet: so both at once.
            failed, told = engine._work_during(lambda: client.init_weight_transfer_engine(said), join)
            engine._raise_first(failed, told)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def _planned(self, weights: dict[str, Any]) -> torch_overlay.Transfer:
        """Return a new transfer of these weights to all workers, for the caller to store. Collective over all."""
        return torch_overlay.Transfer(weights, None, group=self._place, strict=False, **self._options)

    def send_weights(self, check: bool = False) -> None:
        """Send the source's present weights to all workers: one round. Every rank of the trainer calls it.

        If the engine is open, a server that fails doesn't end the round: it is left out, and initialized anew when the
        next one begins. The sender's log says why, and `joined` and `gone` of `transfer` say who.

        Args:
            check: compare replicas again, and with `changes` send everything: for servers that got other weights, or
                lost theirs, without this engine. The same on all ranks of the trainer.

        Raises:
            ValueError: the source of another trainer's rank failed, or the round was refused by a worker; names the
                rank and its error. Raised on all trainers and workers before anything is sent; the rank that failed
                raises its own error. The next round can go on as usual.
            RuntimeError: a rank didn't come within the timeout, or the engine was shut down. Or the servers failed to
                start the round, to load the weights, or to finish: raised on all trainers, on the sender as the
                client's error.
        """
        then = "Nothing was sent; see to the servers, and send again."
        finished = "The weights were sent; some servers may not have them all."
        info = {"check": True} if check else {}
        self._round(info, lambda: self._run(lambda transfer: transfer.run(check=check)), then, finished)

    def verify(self) -> dict[str, str]:
        """Compare what all workers serve with what the source holds now, bit by bit. Every rank of the trainer calls
        it, in place of `send_weights`, after a round and before the optimizer steps. Pause the server as for a round.

        What goes straight into a worker's model is compared by `Transfer.verify`, without sending a tensor. What comes
        layer by layer is sent again, and compared layer by layer: each worker does vLLM's own step again, and compares
        what that makes with what was served. So it does for what came whole, with the model's `load_weights`, on the
        tensors that came in the last round. Constants that the loader sets, such as rows of padding, are compared, too.
        What the step overwrites is put back, right or wrong.

        The step takes as long as in a round; three times as long if something differs, or elements can't be compared.
        Meanwhile a copy of the modules that are compared is in the memory of the worker's host: of one layer, or of all
        to which something comes whole.

        Returns:
            By name, what the workers can't compare, and why, the same on all ranks. Empty if all of the model was
            compared. These are parameters that nothing of the trainer's reaches, or that vLLM's own step doesn't write;
            elements that it makes of memory which nothing wrote; objects that it makes anew, such as weights that its
            CPU platform packs; and tensors in attributes that it writes in place.

        Raises:
            ValueError: on all trainers: a worker serves something else than the trainer holds. Names the tensor and
                the rank, with the box of the tensor that goes there, or the elements of the server's parameter. Or
                nothing could be compared: a trainer's source failed, some trainers send while others verify, or what
                comes whole hasn't come since landings changed. The next round goes on as usual.
            RuntimeError: as for `send_weights`.
        """
        unseen: dict[str, str] = {}

        def compare() -> None:
            """Compare what went straight into the models, and hear what workers say of the rest."""
            self._run(lambda transfer: transfer.verify())
            transfer: Any = self._transfer
            if transfer.staged:  # which workers compare with what they serve
                transfer.run(check=True)
            unseen.update(share_findings(self._place, self._trainers))  # type: ignore[arg-type]

        then = "Nothing was compared; see to the servers, and verify again."
        self._round({"verify": True}, compare, then, "The comparison itself found nothing.")
        return unseen

    def _round(self, info: dict[str, Any], work: Callable[[], None], then: str, finished: str) -> None:
        """Have the servers call their workers, and work meanwhile; `then` and `finished` end the errors of a server
        that doesn't start or finish. Collective over the trainers."""
        _ = self.transfer
        started = self._error_of(self.client.start_weight_update) if self.is_sender else None
        self._share_outcome(started, "start it at vLLM's servers", then)
        failed, told = self._work_during(lambda: self.client.update_weights(info), work)
        if isinstance(failed, ValueError) or (failed is not None and failed is self._own_error):
            if self.is_sender and told is None:
                self._error_of(self.client.finish_weight_update)  # vLLM refuses to begin a round within another one
            # It says itself why nothing was sent. What a client raises is the same in the words of vLLM, or of HTTP.
            raise failed from told
        if failed is not None:  # on all trainers, so none waits in `_share_outcome` below
            self._raise_first(failed, told)
        if told is None and self.is_sender:
            told = self._error_of(self.client.finish_weight_update)
        self._share_outcome(told, "finish it at vLLM's servers", finished)

    def _run(self, job: Callable[[Any], object]) -> None:
        """Call `job` with the transfer; without weights, tell all ranks why, and with other landings plan anew before.
        Collective over all trainers and workers."""
        transfer: Any = self._transfer
        try:
            # Anew in each round: FSDP may have replaced the local tensors since, and a source may be a function.
            weights = self._weights()
            transfer.bind(source=weights)
        except Exception as error:
            self._own_error = error
            why = f"{type(error).__name__}: {error}"
            # By some worker, so that all plan anew: they hear the reason there.
            if MOVED in transfer.refuse(why) and not self._is_open:
                refuse_transfer(self._place, why)  # type: ignore[arg-type]
            raise
        except BaseException:  # interrupted: the others hear of it when our connections close
            self.shutdown()
            raise
        try:
            job(transfer)
            if isinstance(self.client, Servers):
                self.client.leave_out_others([unit.name for unit in self._place.fleet.units])  # type: ignore[union-attr]
        except ValueError as error:
            if MOVED not in str(error) or self._is_open:
                raise
            # Some worker's landings have changed, for instance since experts moved. All ranks plan anew, and go on
            # with this round.
            self._transfer = self._planned(weights)
            transfer.close()
            job(self._transfer)

    @property
    def transfer(self) -> torch_overlay.Transfer:
        """The transfer of the present plan.

        Raises:
            RuntimeError: the engine was shut down.
        """
        if self._transfer is None:
            raise RuntimeError("The engine 'torch_overlay' was shut down.")
        return self._transfer

    @staticmethod
    def _error_of(call: Callable[[], object]) -> Exception | None:
        """Call a function. Returns its exception, or None; interrupts pass. What it returns is dropped."""
        try:
            call()
        except Exception as error:
            return error
        return None

    def _share_outcome(self, failed: Exception | None, what: str, then: str) -> None:
        """Raise on all trainers if the sender's call to the servers failed: the others would wait for workers that
        nobody called. Collective over the trainers."""
        if self._trainers > 1:
            hint = "Each rank of the trainer calls send_weights, or verify, in each round."
            meeting = self._place.meeting("A round of weights", range(self._trainers), hint)  # type: ignore[union-attr]
            said = meeting.say("" if failed is None else f"{type(failed).__name__}: {failed}")
            why = next(filter(None, said.values()), "")
            if why and failed is None:
                raise RuntimeError(
                    f"A round of weights needs the sender, rank 0 of the trainer, to {what}, and they failed it: "
                    f"{why.removesuffix('.')}. {then}"
                )
        if failed is not None:
            raise failed

    def shutdown(self) -> None:
        """Leave the workers, and close the transfer. The engine keeps its source, and so what the source holds.

        A second call does nothing. `send_weights` raises a RuntimeError after it.
        """
        transfer, self._transfer = self._transfer, None
        place, self._place = self._place, None
        for each in (transfer, place):
            if each is not None:
                each.close()

    def _work_during(
        self, call: Callable[[], object], work: Callable[[], None]
    ) -> tuple[Exception | None, Exception | None]:
        """Run `work` here, in the thread to which the transfer's collectives belong, while on the sender another thread
        runs `call`."""
        if not self.is_sender:
            return self._failure_of(work), None
        with ThreadPoolExecutor(1, "torch_overlay vllm") as pool:
            called: Future[object] = pool.submit(call)
            failed = self._failure_of(work)
            told = called.exception()
        if told is not None and not isinstance(told, Exception):
            raise told
        return failed, told

    def _failure_of(self, work: Callable[[], None]) -> Exception | None:
        error = self._error_of(work)
        if error is not self._own_error and not self._is_open:  # the words of a source are its own
            name_worker(error, self._trainers)
        return error

    @staticmethod
    def _raise_first(failed: Exception | None, told: Exception | None) -> None:
        """Raise the workers' error, if there is one, as it is the reason for ours; else ours."""
        if told is not None:
            raise told from failed
        if failed is not None:
            raise failed

    def _weights(self) -> dict[str, Any]:
        if hasattr(self.source, "tensors"):
            return dict(self.source.tensors())
        metas = {meta.name: meta for meta in self.source.metadata}
        return {name: self._piece(metas[name], tensor) for name, tensor in self.source.iter_local()}

    def _piece(self, meta: Any, tensor: Any) -> Any:
        """Return what this rank holds of a tensor, as a piece of the whole tensor."""
        start = (0,) * len(meta.shape)
        if meta.placements is not None:
            dims = [getattr(placement, "dim", None) for placement in meta.placements]  # vLLM's Replicate has none
            regions = Regions.of(dims, [None] * len(dims), meta.shape, meta.mesh_shape)
            coordinate = Ranks.of(meta.owners, meta.mesh_shape).coordinate(self.rank)
            start = regions.box(coordinate).start  # type: ignore[arg-type]
        return torch_overlay.piece(tensor.detach(), meta.shape, start)
