"""The worker's side: a trainer's tensors are written straight into the model, where its own loader would put them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import types
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

import torch_overlay
from torch_overlay.loading.landings import Landings, all_whole, find_landings
from torch_overlay.loading.loader_run import Meta, named_tensors, storage_of, storages
from torch_overlay.transfers.agreement import refuse_transfer

from . import MOVED, name_worker, require_worker
from .experts import LiveExperts, states_of
from .layouts import Layouts, served_by
from .verification import compare_with_step, share_findings

# Before the imports below: an older vLLM has only some of these names, and the error would say no more than that.
require_worker()

from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch_overlay.rendezvous.place import Place

logger = logging.getLogger("vllm.torch_overlay")  # vLLM shows what goes to loggers below its own
_REFUSED = "A round of weights was refused, and the server keeps those that it has"
STAGE = 32 << 20  # bytes of layers that come together, since each stage costs some milliseconds beside its bytes
_HALF = "A round of weights isn't in use everywhere: send again"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer's engine tells each worker.

    Attributes:
        address: "tcp://host:port" of the first trainer, where all meet. A key isn't sent: each process has it in its
            environment (TORCH_OVERLAY_MEET_KEY).
        trainers: how many ranks the trainer has. In the place they come before the workers.
        workers: how many workers there are.
        timeout: seconds that they wait for one another.
        budget: bytes that buffers may take on a rank.
        params: name, type and shape of each tensor of the checkpoint.
        changes, relay: as a `Transfer` takes them. An older trainer says nothing of `relay`.
        name: of this server among several that come and go; "" if it is the only one.
    """

    address: str
    trainers: int
    workers: int
    timeout: float
    budget: int
    params: list[Sequence[Any]] = field(default_factory=list)
    changes: bool | str = False
    relay: bool | None = None
    name: str = ""

    @property
    def metas(self) -> list[Meta]:
        """The tensors that the trainer will send.

        Raises:
            ValueError: the trainer names a type that torch doesn't have.
        """
        found = []
        for name, dtype, shape in self.params:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"The trainer says that {name!r} is of type {dtype!r}, which is no type of torch's.")
            found.append(Meta(name, getattr(torch, dtype), tuple(shape)))
        return found


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the trainer's engine tells each worker of one round.

    Attributes:
        check: as `Transfer.run` takes it.
        verify: nothing is sent, and what workers serve is compared, as `TrainerEngine.verify` says.
    """

    check: bool = False
    verify: bool = False


class BesideStages(NamedTuple):
    """The layers for which vLLM's own step is called when all stages have come.

    Attributes:
        tied: those that make something of a weight that comes to another layer.
        with_whole: those to which something whole goes.
        deferred: attention that makes weights of what comes to its children.
    """

    tied: list[torch.nn.Module]
    with_whole: list[torch.nn.Module]
    deferred: list[torch.nn.Module]


class WorkerEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives each round's weights into the model.

    A tensor that the model's loader only slices is written in place, and each worker gets its own part of it. What goes
    to layers whose weights vLLM lays out anew after loading, or quantizes, comes layer by layer in the loader's layout,
    in slices, too, and vLLM's own step makes of it what is served. Tensors that the loader computes with come whole and
    go through `load_weights`.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *about: Any) -> None:
        super().__init__(config, *about)
        # Up to 0.26 the arguments are (parallel_config, model), and the worker begins and ends reloads. Such an engine
        # has no device and no configs, which later ones get from the base class. There a quantized layer's method has
        # the config of the quantization.
        self._is_old = len(about) == 2
        if self._is_old:
            methods = [getattr(module, "quant_method", None) for module in self.model.modules()]
            self._quantization = next(filter(None, [getattr(each, "quant_config", None) for each in methods]), None)
            first = next(self.model.parameters())
            self.device, kind = first.device, None if self._quantization is None else type(self._quantization).__name__
            self.model_config = types.SimpleNamespace(dtype=first.dtype, quantization=kind)
        else:
            self._quantization = getattr(getattr(self, "vllm_config", None), "quant_config", None)
        self._place: Place | None = None
        self._transfer: torch_overlay.Transfer | None = None
        self._layouts = _layouts()
        self._is_inference = False
        self._served: dict[str, Any] = {}  # of the layers of a stage, what they served before
        self._beside = BesideStages([], [], [])
        self._compared: tuple[dict[str, str], dict[str, str]] | None = None  # while stages are compared: what was found
        self._found: Landings | None = None
        self._bound: Landings | None = None  # those that the transfer writes to
        self._planned: Any = None  # the boxes for which it was planned
        self._metas: list[Meta] = []
        self._trainers = 0
        self._is_open = False  # whether this server is one of several that come and go
        self._options: dict[str, Any] = {}
        # Now, since vLLM hides its objects from the search once the server has started.
        self._expert_states = states_of(self.model) if self._moves_experts() else []
        self._experts: LiveExperts | None = None
        self._is_loader_known = False  # whether its loader places experts as `LiveExperts.loading` needs it

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainers, and plan. vLLM calls it once on each worker, while the trainers are in `trainer_init`. If
        it fails, the engine is shut down, and can be initialized again. A server among several that come and go only
        joins the trainers' place, also if it is initialized already, and plans in its first round.

        Raises:
            RuntimeError: the engine is initialized already; or a rank left, or didn't come within the timeout.
            ValueError: the trainer's tensors don't fit the model here or on another rank; experts of this server can't
                be written (`enable_eplb`, `enable_elastic_ep`); the budget is too small; or the processes can't meet: a
                wrong address, another key, or another number of ranks (see `torch_overlay.meet`).
            TypeError: the model's parameters are DTensors.
            UnknownRelease: there are no fingerprints of this torch release, and the overlay is off.
        """
        self._is_open = bool(init_info.name)
        if self._is_open:
            if self._is_old:
                raise ValueError("The engine 'torch_overlay' needs vLLM 0.27 for servers that come and go.")
            self.shutdown()
        if self._transfer is not None:
            raise RuntimeError("The engine 'torch_overlay' is initialized already; shut it down before.")
        self._trainers = init_info.trainers
        try:
            self._join(init_info)
        except BaseException as error:
            if isinstance(error, Exception) and not self._is_open:
                name_worker(error, self._trainers)
            self.shutdown()
            raise

    def _join(self, init_info: InitInfo) -> None:
        """Ask the loader where tensors go, meet all others, and make the transfer. Collective over all of them. If the
        loader fails, it raises here, and they raise its text; they would wait for the whole timeout."""
        problem: Exception | None = None
        try:
            self._metas, self._options = init_info.metas, options_of(init_info)
            self._ask_loader()
        except Exception as error:
            problem = error
        size, rank = init_info.workers, worker_number(self.parallel_config)
        if self._is_open:
            # Join even if there is a problem: else the other workers would wait for us for the whole timeout.
            self._place = torch_overlay.join(
                init_info.address, name=init_info.name, rank=rank, world_size=size, timeout=init_info.timeout
            )
            if problem is not None:
                raise problem
            return
        size, rank = init_info.trainers + size, init_info.trainers + rank
        try:
            # Meet even if there is a problem: else trainers and other workers would wait for us for the whole timeout,
            # and not learn why.
            self._place = torch_overlay.meet(init_info.address, rank=rank, world_size=size, timeout=init_info.timeout)
            if problem is not None:
                refuse_transfer(self._place, str(problem))
        finally:
            if problem is not None:
                raise problem
        self._plan()

    def _ask_loader(self) -> None:
        """Find out where the model's loader puts each of the trainer's tensors, into `_found`; experts that vLLM moves
        (EPLB), to where they are now, since vLLM's own loader would write over other experts."""
        self._check_scales()
        self._experts = self._live_experts()
        with torch.device(self.device), self._layout_of_loader():
            found = self._landings(self._load)
            beside = self._beside_stages(found)
            if self._experts is not None:
                self._experts.check_landings(found)
                if not self._is_loader_known:
                    self._experts.check_loader(lambda: self._landings(self._load_as_vllm))
                    self._is_loader_known = True
        self._found, self._beside = found, beside
        self._log_landings()

    def _moves_experts(self) -> bool:
        return bool(getattr(self.parallel_config, "enable_eplb", False))

    def _live_experts(self) -> LiveExperts | None:
        """Return the experts as they lie now; None if the server doesn't move them (`enable_eplb`)."""
        if not self._moves_experts():
            return None
        if getattr(self.parallel_config, "enable_elastic_ep", False):
            raise ValueError(
                "The engine 'torch_overlay' needs workers that stay, and this server has enable_elastic_ep, which adds "
                "and removes some. Start it without."
            )
        return LiveExperts(self.model, self._expert_states)

    def _plan(self) -> None:
        """Make the transfer into the present landings anew. Collective over all trainers and workers."""
        found: Any = self._found
        stages: list[tuple[list[str], list[Callable[[dict[str, Any]], None]]]] = []
        size = STAGE
        for (_, modules), (names, make) in zip(found.groups, found.stages(self._process)):
            if size >= STAGE:
                stages.append(([], []))
                size = 0
            size += sum([param.nbytes for module in modules.values() for param in found.loaded(module)])
            stages[-1][0].extend(names)
            stages[-1][1].append(partial(self._at_stage, names, modules, make))
        with torch.device(self.device):
            made = torch_overlay.Transfer(
                None, found.target(), group=self._place, strict=False, stages=together(stages), **self._options
            )
        if self._transfer is not None:
            self._transfer.close()
        self._transfer, self._bound, self._planned = made, found, _boxes(found)
        unknown = made.left_out["source"]
        if unknown:
            logger.warning("no worker takes %d of the trainer's tensors: %s", len(unknown), ", ".join(unknown[:5]))

    def _check_scales(self) -> None:
        """Check that the trainer sends fp8 weights, each with its scale, to a server that was started from an fp8
        checkpoint: the loader would cast others, and keep the scales of the former ones."""
        if not getattr(self._quantization, "is_checkpoint_fp8_serialized", False):
            return
        names = {meta.name for meta in self._metas}
        # Scales may be float8 themselves (e8m0fnu).
        scales = {f"{name}_{scale}" for name in names for scale in ("scale", "scale_inv")}
        fp8 = [m.name for m in self._metas if str(m.dtype).startswith("torch.float8") and m.name not in scales]
        scaled = [name for name in fp8 if names & {f"{name}_scale", f"{name}_scale_inv"}]
        if not fp8 or len(scaled) < len(fp8):
            lacks = [name for name in fp8 if name not in scaled] or [meta.name for meta in self._metas]
            what = f"{lacks[0]!r} without" if lacks else "nothing"
            raise ValueError(
                "The engine 'torch_overlay' needs the weights of an fp8 checkpoint with their scales, as this server "
                f"has one, and the trainer sends {what}. Send both, or start the server from a checkpoint "
                "in the trainer's type, with quantization='fp8' to have vLLM quantize it."
            )

    @property
    def _takes_whole(self) -> bool:
        """True if the model is quantized, and this vLLM keeps no layout into which its loader loads."""
        return self._layouts is None and getattr(self.model_config, "quantization", None) is not None

    def _landings(self, load: Callable[..., object]) -> Landings:
        """Ask a loader where it puts tensors, with layers in its layout. What goes to memory that vLLM may lay out anew
        in another way, or to another device than the worker's, comes whole."""
        if self._takes_whole:
            return all_whole(load, self.model, self._metas, "the model is quantized")
        anew = {key for module in self.model.modules() if self._is_reloaded(module) for key in self._storages(module)}
        unreliable = dict.fromkeys(anew, "vLLM makes something of it after loading")
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.device.type not in (torch.device(self.device).type, "meta"):
                unreliable[storage_of(tensor)] = f"it belongs to another device than {self.device}"

        def refused(why: str) -> None:
            """Log why the loader refuses tensors, if a layer that was laid out anew may be the reason."""
            # If vLLM has laid out some layer anew, its loader may refuse tensors now that it takes during a reload,
            # which restores the loader's layout first. Then this isn't an error before the round.
            if not anew:
                raise ValueError(
                    f"The engine 'torch_overlay' needs a model whose load_weights takes all {len(self._metas)} tensors "
                    f"of the trainer, and that of {type(self.model).__name__} {why}. Leave out of the trainer's source "
                    "what this model doesn't have, or give it the name that it has in a checkpoint (names=)."
                )
            logger.warning("the model's load_weights %s; it is asked again in each round", why)

        return find_landings(
            load, self.model, self._metas, self._expert_maps, unreliable=unreliable, when_refused=refused
        )

    def _expert_maps(self) -> dict[str, Any]:
        """Return all maps by which this worker places experts, to notice changes: by module, what elastic expert
        parallelism changes, and under "" vLLM's tensor of slots, which `enable_eplb` changes in place."""
        found: dict[str, Any] = {} if self._experts is None else {"": self._experts.map}
        for name, module in self.model.named_modules():
            for key in ("expert_map", "_expert_map"):
                its = getattr(module, key, None)
                if isinstance(its, torch.Tensor):
                    found[name] = its.tolist()
        return found

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Call the model's `load_weights`, with experts put where they are now. Returns and raises what that does."""
        with contextlib.nullcontext() if self._experts is None else self._experts.loading():
            return self._load_as_vllm(weights)

    def _load_as_vllm(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Call the model's `load_weights`, which puts experts where they were at first; without vLLM's check that a
        draft head is complete, since `weights` need not be all of the model's."""
        with _all_may_not_come():
            return self.model.load_weights(weights)

    def _log_landings(self) -> None:
        """Log how much is direct, why the rest isn't, and which parameters nothing reaches."""
        found: Any = self._found
        direct, whole = found.nbytes("direct"), found.nbytes("whole")
        logger.log(
            logging.WARNING if direct < whole else logging.INFO,
            "%d of %d tensors (%d bytes) go straight into this worker's model; %d (%d bytes) come whole; the loader "
            "puts %d nowhere",
            *(len(found.direct), len(self._metas), direct, len(found.whole), whole, len(found.skipped)),
        )
        for name, why in found.whole.items():
            logger.debug("%s comes whole: %s", name, why)
        lost = [name for name, _ in self.model.named_parameters() if name in found.untouched]
        if lost:
            logger.warning("nothing of the trainer's reaches %d parameters: %s", len(lost), ", ".join(lost[:5]))

    def start_weight_update(self) -> None:
        """Tell the trainers, if they don't know this server yet, that it is ready. vLLM's reload begins in
        `receive_weights`, when all weights have arrived."""
        if self._is_open and self._place is not None and self._place.fleet is not None:
            self._place.fleet.knock()

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable[..., object] | None = None) -> None:
        """Run the transfer once, and hand the tensors that come whole to the model's loader; or, if the trainers
        verify, compare what this worker serves. Collective over all trainers and workers.

        If some rank refuses the round before anything is sent, all trainers raise an error; this worker only logs it,
        and returns. Then the server keeps the weights that it had. So it does for what comes whole if the transfer
        fails later: vLLM's reload, which moves parameters to meta, begins only after the transfer, and is ended also if
        the loader fails. Parameters that are written in place may be a mixture then, as the transfer's error says.

        Args:
            load_weights: the function with which vLLM up to 0.26 would load. It isn't called. It only tells whether
                vLLM has begun an update in the checkpoint's format, which is refused.

        Raises:
            RuntimeError: `init_transfer_engine` wasn't called; or the transfer failed, see `Transfer.run`.
            ValueError: vLLM has begun an update in the checkpoint's format. All trainers raise it, too.
            Exception: what the model's `load_weights` raises.
        """
        if self._found is None or (self._transfer is None and self._place is None):
            raise RuntimeError("The engine 'torch_overlay' isn't initialized: init_transfer_engine comes first.")
        self._is_inference = torch.is_inference_mode_enabled()
        if load_weights is not None and load_weights == self.model.load_weights:
            self._refuse_an_open_reload()
        try:
            if update_info.verify:
                self._verify()
                return
            self._run(lambda transfer: transfer.run(check=update_info.check))
        except ValueError as error:
            # vLLM's executor (0.32) stops at the first worker's error, and takes what the other workers answered for
            # their answers to its next call. So an error that the trainers raise, too, isn't raised by all workers.
            if not self._is_open:
                name_worker(error, self._trainers)
            what = _REFUSED if "nothing was sent" in str(error) else _HALF
            what = "A verification of weights failed" if update_info.verify else what
            logger.error("%s: %s", what, error)
            return
        except RuntimeError as error:
            if not self._is_open:
                name_worker(error, self._trainers)
            raise
        for module in self._beside.tied:
            self._process_tied(module)
        if self._beside.with_whole or self._beside.deferred:
            self._load_whole()
        else:
            self._found.load_whole()  # writes the constants that the loader fills in, such as rows of padding

    def _load_whole(self) -> None:
        """Hand the tensors that came whole to the loader, within vLLM's reload of the modules that they go to."""
        found: Any = self._found
        _reload("initialize")(modules := self._modules_to_reload())
        try:
            with torch.device(self.device):
                # Copies, since the loader may change or keep what it gets. With `changes`, the next round needs it as
                # it came, and `verify` always does.
                found.load_whole(copies=True)
        except BaseException:
            try:
                self._end_reload(modules)
            except Exception:  # the first error is the one to raise
                logger.exception("vLLM's reloading could not be finished after an error in it")
            raise
        self._end_reload(modules)

    @contextlib.contextmanager
    def _layout_of_loader(self) -> Iterator[None]:
        """Put the layers that come in stages into the loader's layout, on meta."""
        if self._layouts is None:
            yield
        else:
            with self._layouts.of_loader(self._staged_modules(), tied_parameters(self.model)):
                yield

    def _staged_modules(self) -> list[torch.nn.Module]:
        return [module for module in self.model.modules() if self._is_staged(module)]

    def _is_staged(self, module: torch.nn.Module) -> bool:
        """True if what a module serves is made of slices in the loader's layout. Experts that vLLM moves aren't."""
        return (
            self._layouts is not None
            and not self._moves_experts()
            and (lays_out_anew(module) or getattr(self.model_config, "quantization", None) is not None)
            and self._layouts.has(module)
        )

    def _is_reloaded(self, module: torch.nn.Module) -> bool:
        """True if vLLM may make something of a module's weights, in another way than in stages."""
        return lays_out_anew(module) and not self._is_staged(module)

    def _storages(self, module: torch.nn.Module) -> set[int]:
        """The storages of which vLLM's reload makes something; attention reads its children's again at the end."""
        is_deferred = self._layouts is not None and self._layouts.is_deferred(module)
        return storages(module, recurse=self._is_reloaded(module) and not is_deferred)

    def _process(self, name: str, module: torch.nn.Module) -> None:
        """Do vLLM's step for a layer that has all that its loader would have loaded."""
        self._layouts.process(module, self._served[name])  # type: ignore[union-attr]

    def _process_tied(self, module: torch.nn.Module) -> None:
        """Do vLLM's step for a layer whose weight is another layer's, and came there."""
        with torch.device(self.device):
            self._layouts.process(module, served_by(module))  # type: ignore[union-attr]

    def _at_stage(
        self,
        names: Sequence[str],
        modules: dict[str, torch.nn.Module],
        make: Callable[[dict[str, Any]], None],
        tensors: dict[str, Any],
    ) -> None:
        """Serve, or compare, what the slices of some layers make."""
        tensors = {name: tensors[name] for name in names}
        self._served = {name: served_by(module) for name, module in modules.items()}
        with torch.device(self.device), torch.inference_mode(self._is_inference):
            if self._compared is None:
                make(tensors)
            else:
                for of_all, of_stage in zip(self._compared, compare_with_step(modules, partial(make, tensors))):
                    of_all.update(of_stage)

    def _verify(self) -> None:
        """Compare what this worker serves with what the trainer holds. Collective over all trainers and workers."""
        place: Any = self._place
        self._run(lambda transfer: transfer.verify(), verifies=True)
        self._compared = {}, {}
        try:
            transfer: Any = self._transfer
            if transfer.staged:
                transfer.run(check=True)  # whole, also where the last slices are kept for changes
            of_stages = self._compared
        finally:
            self._compared = None
        differences: list[str] = []
        try:
            found, unseen = self._compare_with_loader()
            found, unseen = {**found, **of_stages[0]}, {**unseen, **of_stages[1]}
            differences += [f"{name!r} of rank {place.rank} {how}" for name, how in found.items()]
        except Exception as error:
            unseen = {}
            logger.exception("what came whole could not be compared")
            differences.append(f"rank {place.rank} can't compare: {type(error).__name__}: {error}")
        for name, why in unseen.items():
            logger.warning("%s can't be compared: %s", name, why)
        share_findings(place, self._trainers, differences, unseen)

    def _compare_with_loader(self) -> tuple[dict[str, str], dict[str, str]]:
        """Compare what the loader made with what it makes now: by name, how it differs, and what can't be compared."""
        found: Any = self._found
        names = {storage_of(tensor): name for name, tensor in named_tensors(self.model)}
        differences: dict[str, str] = {}
        unseen = {name: f"{many} elements of it get nothing" for name, many in found.untouched.items()}
        overwritten = []  # constants, which the loader's step sets
        for view, value in found.fills:
            if view.is_meta:  # compared in its stage
                continue
            wrong = int((view != value).sum()) if value == value else int((~view.isnan()).sum())
            if wrong:
                overwritten.append((view, view.clone()))
                name = names[storage_of(view)]
                differences[name] = f"differs in {wrong} elements from {value}, to which its loader sets them"
        if some := (*self._beside.with_whole, *self._beside.deferred):
            own = {module: name for name, module in self.model.named_modules()}
            modules = {own[module]: module for module in some}
            try:
                of_step, unseen_there = compare_with_step(modules, self._load_whole)
            finally:
                with torch.inference_mode():
                    for view, before in overwritten:
                        view.copy_(before)
            differences, unseen = {**of_step, **differences}, {**unseen, **unseen_there}
        return differences, unseen

    def _refuse_an_open_reload(self) -> None:
        """Refuse a round on all ranks because vLLM up to 0.26 has begun an update in the checkpoint's format."""
        self._end_reload(self.model)
        why = (
            "The engine 'torch_overlay' writes into the model itself: begin its updates with "
            "start_weight_update(is_checkpoint_format=False)."
        )
        self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        """Say in place of a run, and of a new plan if there is one, that this worker can't take part. Collective over
        all trainers and workers."""
        told = self._transfer.refuse(why)  # type: ignore[union-attr]
        if MOVED in told and not self._is_open:  # by another worker, so that all plan anew: they hear the reason there
            refuse_transfer(self._place, why)  # type: ignore[arg-type]
        raise ValueError(why)

    def _run(self, job: Callable[[Any], object], verifies: bool = False) -> None:
        """Call `job` with the transfer; all ranks plan anew if the plan doesn't hold somewhere. Collective over all
        trainers and workers."""
        if self._transfer is None:
            self._plan()
        transfer: Any = self._transfer
        why = None if self._experts is None else self._experts.under_way()
        if why is not None:
            self._refuse(why)
        with self._layout_of_loader():
            why = self._found.stale()  # type: ignore[union-attr]
        if why is not None:
            logger.info("asking the loader again: %s", why)
            try:
                self._ask_loader()
            except Exception as error:
                self._refuse(f"{type(error).__name__}: {error}")
        if verifies and not self._has_come_whole():
            again = f"since {why}" if why else "before the first round"
            self._refuse(f"what has to come whole isn't here {again}: send the weights, and verify them then")
        # Not only where they were stale: a round before may have failed after the loader was asked.
        if self._found is not self._bound and (self._is_open or _boxes(self._found) == self._planned):
            # Only memory moved, or experts changed places on this worker. The plan still holds; or at an open place the
            # Transfer is made anew.
            transfer.bind(target=self._found.target())  # type: ignore[union-attr]
            self._bound = self._found
        if self._found is self._bound:
            try:
                job(transfer)
                return
            except ValueError as error:
                if MOVED not in str(error):
                    raise
        else:
            transfer.refuse(f"{MOVED}: {why or 'it was asked again before'}")
        # The landings of some worker have changed, perhaps ours: all ranks plan anew, and go on with this round.
        self._plan()
        job(self._transfer)

    def _has_come_whole(self) -> bool:
        """True if all tensors that come whole have come to the present landings."""
        found: Any = self._found
        whole = found.whole.keys() - {*found.staged}
        if self._bound is not self._found:
            return not whole
        tensors = found.target()  # by the version counter, as `Landings.load_whole` tells
        return all(tensors[name]._version or not tensors[name].numel() for name in whole)

    def _modules_to_reload(self) -> Any:
        """Return what vLLM's layerwise reload gets as a model: `modules()` are those that it may lay out anew and to
        which something whole goes. In a reload, a loader that writes past `weight_loader` is lost, without an error:
        GPT-OSS's experts kept their old weights."""
        if self._takes_whole:
            return self.model
        some = [module for module in self._beside.with_whole if self._is_reloaded(module)]
        some += [module for module in self._beside.deferred if module not in some]
        return types.SimpleNamespace(modules=lambda: iter(some))

    def _beside_stages(self, found: Landings) -> BesideStages:
        """Find the layers for which something is left to do when all stages have come."""
        every = [*self.model.modules()]
        if self._layouts is None:
            return BesideStages([], every if self._takes_whole else self._reached(found, found.whole), [])
        grouped = {module for _, modules in found.groups for module in modules.values()}
        tied = tied_parameters(self.model)
        apart = [module for module in self._staged_modules() if module not in grouped]
        reached = found.storages_of(*found.direct, *found.staged)
        deferred = [
            module
            for module in every
            if self._layouts.is_deferred(module)
            and hasattr(module, "process_weights_after_loading")
            and storages(module) & reached
        ]
        return BesideStages(
            [module for module in apart if any(id(each) in tied for each in module._parameters.values())],
            self._reached(found, found.whole.keys() - {*found.staged}),
            deferred,
        )

    def _reached(self, found: Landings, names: Iterable[str]) -> list[torch.nn.Module]:
        """The modules to whose memory these tensors go."""
        its = found.storages_of(*names)
        return [module for module in self.model.modules() if self._storages(module) & its]

    def _end_reload(self, modules: Any) -> None:
        """End vLLM's layerwise reload: it lays out the weights of these modules anew, on the worker's device."""
        with torch.device(self.device):
            _reload("finalize")(modules, self.model_config)

    def finish_weight_update(self) -> None:
        """Do nothing: vLLM's reload ends in `receive_weights`."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raise an error that says how trainers send with this engine. vLLM up to 0.29 calls this on its trainers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "The engine 'torch_overlay' sends by torch_overlay.integrations.vllm.trainer.TrainerEngine: make one with "
            "trainer_init on each rank of the trainer, and call its send_weights."
        )

    def shutdown(self) -> None:
        """Leave the trainers, and let go of the landings. A second call does nothing. Then `init_transfer_engine` may
        be called again."""
        transfer, self._transfer = self._transfer, None
        place, self._place = self._place, None
        self._found = self._bound = self._planned = None
        for each in (transfer, place):
            if each is not None:
                each.close()


def options_of(init_info: InitInfo) -> dict[str, Any]:
    """Return the options of the `Transfer` that the trainer's message has."""
    return {"budget": init_info.budget, "changes": init_info.changes, "relay": init_info.relay}


def worker_number(parallel: Any) -> int:
    """Return the number of this worker among the workers of all data-parallel replicas, from 0."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


def together(
    stages: Iterable[tuple[list[str], list[Callable[[dict[str, Any]], None]]]],
) -> list[tuple[list[str], Callable[[dict[str, Any]], None]]]:
    """Return stages of which each calls several functions, one after the other."""

    def call(functions: Sequence[Callable[[dict[str, Any]], None]], tensors: dict[str, Any]) -> None:
        for function in functions:
            function(tensors)

    return [(names, partial(call, functions)) for names, functions in stages]


def tied_parameters(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters that several modules have."""
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    return {each for each, count in owners.items() if count > 1}


def lays_out_anew(module: torch.nn.Module) -> bool:
    """True if vLLM may transform a module's weights after loading: by its quantization method (any that isn't known not
    to), by itself (attention with latent heads), or since the CPU platform packs linear weights."""
    if hasattr(module, "cpu_linear"):
        return True
    method = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if kind == "UnquantizedFusedMoEMethod":
        return getattr(getattr(method, "unquantized_backend", None), "name", None) not in ("TRITON", "BATCHED_TRITON")
    known = method is None or kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    return not known or hasattr(module, "process_weights_after_loading")


def _boxes(found: Landings | None) -> Any:
    """Return what a plan depends on: boxes and types of each direct tensor, and the names that come whole."""
    direct = {} if found is None else found.direct
    boxes = {
        name: [(piece.start, tuple(piece._local_tensor.shape), piece._local_tensor.dtype) for piece in pieces]
        for name, pieces in direct.items()
    }
    return boxes, [] if found is None else [*found.whole]


def _layouts() -> Layouts | None:
    """What vLLM has for the layouts of its loader; None if it is too old."""
    try:
        return Layouts()
    except (ImportError, AttributeError):
        return None


def _reload(what: str) -> Callable[..., None]:
    """Return vLLM's function that begins ("initialize") or ends ("finalize") a layerwise reload."""
    module = importlib.import_module("vllm.model_executor.model_loader.reload")
    return getattr(module, f"{what}_layerwise_reload")  # type: ignore[no-any-return]


def _all_may_not_come() -> contextlib.AbstractContextManager[None]:
    """Return a context without the check of vLLM from 0.27 on that a draft head is complete after each load: here the
    loader gets only the tensors that come whole."""
    try:
        module = importlib.import_module("vllm.model_executor.model_loader.mtp_validation")
    except ImportError:
        return contextlib.nullcontext()
    return module.disable_mtp_completeness_check()  # type: ignore[no-any-return]
