"""Experts that vLLM's load balancer (EPLB) moves: where each one lies now, and how a model's loader puts it there.

vLLM has `physical` slots for experts, in equal parts on the workers, and a map that says for each slot which `logical`
expert of the checkpoint lies in it. Several slots may have the same. A rebalance moves weights between slots and
changes the map; `load_weights` of a model goes on by the map of the start, and would write over other experts. So
`LiveExperts.loading` changes what the loaders of these parameters do with the number of an expert.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from typing import TYPE_CHECKING, Any

import torch

from torch_overlay.loading.loader_run import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay.loading.landings import Landings

_STATE = "vllm.distributed.eplb.eplb_state"


class LiveExperts:
    """The experts of one model on one worker, where the server has `enable_eplb`. Made anew after each rebalance.

    Attributes:
        parameters: the parameters of this worker's experts, by name: what vLLM moves.
    """

    def __init__(self, model: torch.nn.Module, states: Sequence[Any]) -> None:
        if len(states) != 1:
            raise ValueError(f"{_NEEDS}, and {len(states)} of them are of this model.")
        try:
            self._state = states[0]
            self._experts, self._logical = self._state.model, int(self._state.model.num_logical_experts)
            self._layers = [*map(_parameters_of, self._experts.moe_layers, self._experts.expert_weights)]
            rows = self.map.tolist()
            self._check_map(rows)
            self._slots = [_local_slots(layer.routed_experts, len(rows[0])) for layer in self._experts.moe_layers]
            self.under_way()
        except (AttributeError, IndexError, ImportError, TypeError) as error:
            raise ValueError(f"{_NEEDS}: {type(error).__name__}: {error}.") from error
        names = {id(param): name for name, param in model.named_parameters()}
        self.parameters = {names[id(param)]: param for layer in self._layers for param in layer}
        if any(len(param) != len(slots) for layer, slots in zip(self._layers, self._slots) for param in layer):
            raise ValueError(f"{_NEEDS}, and a parameter hasn't one row for each slot of this worker.")

    @property
    def map(self) -> torch.Tensor:
        """The logical expert in each slot, by layer: vLLM's own tensor, which changes."""
        found: torch.Tensor = self._state.physical_to_logical_map
        return found

    def under_way(self) -> str | None:
        """Say why weights can't be written now; None if they can. An asynchronous rebalance copies a layer's experts to
        a buffer, and writes them to their new slots in a later step: old weights over new ones."""
        state = self._state
        if not state.rebalanced and state.pending_result is None:
            return None
        return (
            "vLLM is moving experts (EPLB), which it ends within as many steps as the model has layers with experts: "
            "let the server answer something, and send again"
        )

    @contextlib.contextmanager
    def loading(self, is_anywhere: bool = True) -> Iterator[None]:
        """Replace `weight_loader` of the experts' parameters, in this context, by one that puts each logical expert
        into all of its slots here."""
        with contextlib.ExitStack() as stack:
            for layer, slots, row in zip(self._layers, self._slots, self.map.tolist()):
                places: dict[int, list[int]] = {}
                for slot in slots if is_anywhere else ():
                    places.setdefault(row[slot], []).append(slot)
                for param in layer:
                    loader = param.weight_loader
                    param.weight_loader = _by_map(loader, places, self._logical, len(row))
                    stack.callback(setattr, param, "weight_loader", loader)
            yield

    def check_loader(self, ask: Callable[[], Landings]) -> None:
        """Check that the model's loader writes experts only in the way that `loading` changes."""
        with self.loading(is_anywhere=False):
            found = ask()
        written = {storage_of(view) for view in _views(found)} | found.storages_of(*found.whole)
        names = [name for name, param in self.parameters.items() if storage_of(param) in written]
        if names:
            raise ValueError(
                f"{_NEEDS}, and the loader of {type(self._experts).__name__} writes {', '.join(names[:3])} without "
                "asking for the number of an expert."
            )

    def check_landings(self, found: Landings) -> None:
        """Check that each expert is written directly, and no slot less than another: it would keep old weights."""
        its = found.storages_of(*found.whole)
        whole = [name for name, param in self.parameters.items() if storage_of(param) in its]
        if whole:
            reasons = [*dict.fromkeys(found.whole.values())]
            raise ValueError(
                "The engine 'torch_overlay' needs to write experts that vLLM moves (enable_eplb) straight into the "
                f"model, and {', '.join(whole[:3])} can't be written so: {'; '.join(reasons[:3])}. Start the server "
                "without enable_eplb."
            )
        views: dict[int, list[torch.Tensor]] = {}
        for view in _views(found):
            views.setdefault(storage_of(view), []).append(view)
        for name, param in self.parameters.items():
            reached = [0] * len(param)
            for view in views.get(storage_of(param), ()):
                begin = view.storage_offset() - param.storage_offset()
                last = begin + sum([(length - 1) * step for length, step in zip(view.shape, view.stride())])
                slot = begin // param.stride(0)
                if not 0 <= slot == last // param.stride(0) < len(param):
                    raise ValueError(f"{_NEEDS}, and a tensor goes to several slots of {name} at once.")
                reached[slot] += view.numel()
            if len({*reached}) > 1:
                raise ValueError(
                    "The engine 'torch_overlay' needs all experts of a layer from the trainer, or none of them, where "
                    f"vLLM moves them (enable_eplb): slots of {name} get {min(reached)} to {max(reached)} elements."
                )

    def _check_map(self, rows: list[list[int]]) -> None:
        """Check that experts lay in order at first, every one has a slot in each layer, and tokens go by this map."""
        eplb: Any = importlib.import_module(_STATE).EplbState
        first = [*eplb.build_initial_global_physical_to_logical_map(self._logical, len(rows[0]) - self._logical)]
        if first[: self._logical] != [*range(self._logical)]:
            # `_by_map` relies on it: a loader calls with the number of the first slot, which is then that of the expert
            raise ValueError(f"{_NEEDS}, and at first experts don't lie in the order of their numbers: {first[:64]}.")
        if len(rows) != len(self._layers) or any({*row} != {*range(self._logical)} for row in rows):
            raise ValueError(f"{_NEEDS}, and its map doesn't say where each of {self._logical} experts is.")
        for layer, row in zip(self._experts.moe_layers, rows):
            routes = layer.eplb_state.logical_to_physical_map.cpu()
            is_slot = routes >= 0
            by_routes = dict(zip(routes[is_slot].tolist(), is_slot.nonzero()[:, 0].tolist()))
            if by_routes != dict(enumerate(row)) or int(is_slot.sum()) != len(row):
                raise ValueError(f"{_NEEDS}, and tokens are routed by another map than this state has.")


_NEEDS = (
    "The engine 'torch_overlay' needs vLLM's state of experts that move (enable_eplb) as it is in vLLM 0.24 to 0.33"
)


def states_of(model: torch.nn.Module) -> list[Any]:
    """Return vLLM's states of a model's experts (`EplbModelState`): one, if the server moves its experts, else none.
    The state belongs to vLLM's model runner, so this searches all Python objects: call it before `gc.freeze`, at the
    end of the server's start, hides them."""
    try:
        kind: Any = importlib.import_module(_STATE).EplbModelState
    except (ImportError, AttributeError):
        return []
    modules = {*map(id, model.modules())}
    return [each for each in gc.get_objects() if type(each) is kind and id(each.model) in modules]


def _parameters_of(layer: Any, moved: Sequence[torch.Tensor]) -> list[Any]:
    """Return the parameters whose memory vLLM moves in one layer, in the order of `moved`."""
    parameters = {storage_of(param): param for param in layer.routed_experts.parameters()}
    if any(storage_of(tensor) not in parameters for tensor in moved):
        raise ValueError(f"{_NEEDS}, and what vLLM moves isn't the memory of the model's parameters.")
    return [parameters[storage_of(tensor)] for tensor in moved]


def _local_slots(module: Any, physical: int) -> list[int]:
    manager, many = module.expert_map_manager, int(module.local_num_experts)
    rows = [*range(physical)] if manager.expert_map is None else manager.expert_map.tolist()
    slots = [slot for slot, row in enumerate(rows) if row >= 0]
    if (
        manager.num_fused_shared_experts
        or len(rows) != physical
        or [rows[slot] for slot in slots] != [*range(many)]
        or slots[0] % many
        or slots != [*range(slots[0], slots[0] + many)]
    ):
        raise ValueError(f"{_NEEDS}, and the slots of this worker aren't consecutive: {rows[:64]}.")
    return slots


def _views(found: Landings) -> list[torch.Tensor]:
    """Return the memory of the model that is written directly, as views."""
    pieces = [piece._local_tensor for pieces in found.direct.values() for piece in pieces]
    return pieces + [fill.view for fill in found.fills]


def _by_map(
    loader: Callable[..., Any], places: Mapping[int, Sequence[int]], logical: int, physical: int
) -> Callable[..., Any]:
    """Return a loader that puts a logical expert into all slots which have it, and does nothing for copies."""

    @functools.wraps(loader, assigned=())
    def load(
        param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
    ) -> bool | None:
        if not 0 <= expert_id < physical:
            raise IndexError(f"there is no slot {expert_id} among {physical}")
        slots = places.get(expert_id, ()) if expert_id < logical else ()
        came = [loader(param, loaded_weight, weight_name, shard_id, slot, return_success=True) for slot in slots]
        return any(came) if return_success else None

    return load
