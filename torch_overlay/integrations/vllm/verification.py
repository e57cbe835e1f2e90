"""What `TrainerEngine.verify` compares beside its `Transfer`: what came whole to a worker, and what vLLM made of it.

vLLM's own step (its reload, with the model's `load_weights`) computes what a worker serves. So the step is done again,
with the same tensors, and what it leaves has to be what was served before. Start at `compare_with_step`.
"""

from __future__ import annotations

import types
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_overlay.distributed._mesh.text import of_ranks
from torch_overlay.show.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch_overlay.rendezvous.place import Place

SHOWN = 8  # differences in one message
_TABLES = "_parameters", "_buffers"
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


def share_findings(place: Place, trainers: int, differences: Sequence[str] = (), unseen: Any = None) -> dict[str, str]:
    """Tell all ranks what this one found, and raise what any found. Returns what workers couldn't compare.
    Collective."""
    hint = "Each rank of the trainer calls verify, and its servers' workers are told by their update_weights."
    said = place.meeting("A verification of weights", hint=hint).say([[*differences[:SHOWN]], len(differences), unseen])
    shown = [text for texts, _, _ in said.values() for text in texts]
    if shown:
        many = sum([count for _, count, _ in said.values()]) - len(shown[:SHOWN])
        more = f"; and {many} more" if many else ""
        raise ValueError(
            "A verification of weights: workers don't serve what their own load_weights makes of what the trainer "
            f"holds now: {'; '.join(shown[:SHOWN])}{more}."
        )
    workers: dict[tuple[str, str], list[int]] = {}
    for rank, (_, _, of_rank) in said.items():
        for name, why in (of_rank or {}).items():
            workers.setdefault((name, why), []).append(rank - trainers)
    found: dict[str, list[str]] = {}
    for (name, why), its in workers.items():
        found.setdefault(name, []).append(f"{why} ({of_ranks(its).replace('rank', 'worker')})")
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def compare_with_step(
    modules: Mapping[str, torch.nn.Module], step: Callable[[], object]
) -> tuple[dict[str, str], dict[str, str]]:
    """Do a server's own step again, and compare what modules hold then with what they served before. Afterwards they
    are as they were.

    Parameters and buffers are copied to the host's memory meanwhile; on the device the step needs as much as in a
    round. Also compared are numbers, texts and tensors in attributes that the step sets anew.

    Before the step other bits are written into parameters and persistent buffers. So an element for which the step does
    nothing is told from one that it makes right: vLLM's reload loses what a loader writes past `weight_loader`.

    Returns two dicts by name: how something differs, in words; and why something can't be compared. These are elements
    that the step doesn't write, or makes of memory which nothing wrote, such as the padding of a weight; objects that
    it makes anew (a kernel with weights packed into it); and tensors in attributes that it writes in place.
    """
    served = _Served(modules)
    changed: Collection[str] = served.held
    try:
        found, unseen = served.changed_by(step, 0xFF)
        differences: dict[str, str] = {}
        if found:
            # Memory that nothing wrote holds anything. Here it is filled, and twice with something else. Not above:
            # compiled functions, whose last bits may differ, don't run compiled under a dispatch mode.
            filled = [served.changed_by(partial(_run_filled, step, byte), byte)[0] for byte in (0x55, 0xAA)]
            for name, value in found.items():
                before = served.held[name].values if name in served.held else None
                difference, unknown = _compared(before, value, *[each.get(name, before) for each in filled])
                differences |= {name: difference} if difference else {}
                unseen |= {name: unknown} if unknown else {}
            found |= {**filled[0], **filled[1]}
        changed = found
        return differences, unseen
    finally:
        served.put_back(changed)


class _Held(NamedTuple):
    """What a module serves under one name.

    Attributes:
        leaf: the very object.
        values: what it held: of a parameter or buffer a copy in the host's memory.
        version: of a tensor in an attribute, its version counter.
    """

    leaf: Any
    values: Any
    version: int | None


class _Served:
    """What modules serve, by name in `held`."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules, self.held = modules, dict[str, _Held]()
        # An attribute isn't copied: a server's key-value caches are some.
        for name, leaf, is_own in _leaves(modules):
            copy = _on_host(leaf).clone() if is_own and leaf is not None else leaf
            self.held[name] = _Held(leaf, copy, None if is_own else _version(leaf))
        tables = [table for module in modules.values() for table in _tables_of(module)]
        self._tables = [(table, {**table}) for table in tables]
        # Buffers of integers may be a loader's indices, such as its map of experts.
        self._loaded = {f"{prefix}.{key}".lstrip(".") for prefix, each in modules.items() for key in each._parameters}
        self._loaded |= {
            f"{prefix}.{key}".lstrip(".")
            for prefix, each in modules.items()
            for key, buffer in each._buffers.items()
            if key not in each._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point()
        }

    def changed_by(self, step: Callable[[], object], byte: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Do the step after changing all bytes of what it should load by this one (exclusive or). Returns what it
        changed, by name, and why something can't be compared."""
        self._put_tables_back()
        with torch.inference_mode():
            for name in self._loaded:
                held = self.held[name]
                if held.leaf is not None and held.leaf.numel() and held.leaf.dtype != torch.bool:
                    other = (_bits(held.values) ^ byte).view(-1).view(held.values.dtype).view(held.values.shape)
                    _plain(held.leaf).copy_(other)
        step()
        changed, unseen = {}, {}
        now = {name: (leaf, is_own) for name, leaf, is_own in _leaves(self._modules)}
        for name in {**self.held, **now}:
            leaf, is_own = now.get(name, (None, False))
            held = self.held.get(name, _Held(None, None, None))
            if leaf is held.leaf and not is_own:
                if _version(leaf) != held.version:
                    unseen[name] = "vLLM writes it in place, and it is no parameter or buffer"
            elif _has_values(leaf) and _has_values(held.values):
                values = _on_host(leaf)
                if not _is_same(_on_host(held.values), values):
                    changed[name] = values.clone() if isinstance(values, torch.Tensor) else values
            elif not (isinstance(leaf, types.MethodType) and leaf == held.leaf):
                unseen[name] = f"vLLM makes it anew whenever it loads, as an object ({type(leaf).__name__})"
        return changed, unseen

    def put_back(self, changed: Collection[str]) -> None:
        """Put back all objects, and the values of the parameters and buffers that changed."""
        self._put_tables_back()
        with torch.inference_mode():  # a tensor that was made in this mode can't be written outside
            for name in changed:
                held = self.held.get(name)
                if held is not None and held.values is not held.leaf:
                    _plain(held.leaf).copy_(held.values)

    def _put_tables_back(self) -> None:
        for table, before in self._tables:
            for key in [key for key in table if key not in before]:
                del table[key]
            table.update(before)


class _Filled(TorchDispatchMode):
    """Fills memory that somebody allocates for other operations to write."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and not made.is_meta and made.layout is torch.strided:
            made.untyped_storage().fill_(self._byte & 1 if made.dtype == torch.bool else self._byte)
        return made


def _run_filled(step: Callable[[], object], byte: int) -> None:
    with _Filled(byte):
        step()


def _tables_of(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the dicts in which a module has its tensors, and at last that of its attributes, which has the others."""
    for table in _TABLES:
        yield getattr(module, table)
    yield vars(module)


def _leaves(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Any, bool]]:
    """Yield what modules hold: a name, the object, and whether it is a parameter or buffer."""
    for prefix, module in modules.items():
        *tables, attributes = _tables_of(module)
        for table in tables:
            for key, tensor in table.items():
                yield f"{prefix}.{key}".lstrip("."), tensor, True
        for key, value in attributes.items():
            if key not in (*_TABLES, "_modules"):
                leaves = tree_leaves(value)
                for at, leaf in enumerate(leaves):
                    yield f"{prefix}.{key}{f'[{at}]' if len(leaves) > 1 else ''}".lstrip("."), leaf, False


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without the class of vLLM's parameters, whose operations may do more."""
    return tensor.detach().as_subclass(torch.Tensor)


def _has_values(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_meta
    return isinstance(leaf, _PLAIN)


def _on_host(value: Any) -> Any:
    return _plain(value).cpu() if isinstance(value, torch.Tensor) else value


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as rows."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _kind(value: Any) -> tuple[Any, ...]:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (type(value),)


def _is_same(one: Any, other: Any) -> bool:
    if _kind(one) != _kind(other):
        return False
    return torch.equal(_bits(one), _bits(other)) if isinstance(one, torch.Tensor) else repr(one) == repr(other)


def _compared(served: Any, made: Any, first: Any, second: Any) -> tuple[str, str]:
    """Say how what is served differs from what the step made, and what its runs with filled memory leave unknown."""
    if not isinstance(served, torch.Tensor) or len({*map(_kind, (served, made, first, second))}) > 1:
        if not _is_same(first, second):
            return "", "vLLM makes something else of it each time"
        return f"{_shown(served)} is served, and {_shown(made)} made", ""
    bits = [_bits(_on_host(each)) for each in (served, made, first, second)]
    # The bytes by which `compare_with_step` changed what was served.
    kept = [(each == bits[0] ^ byte).all(1) for each, byte in zip(bits[1:], (0xFF, 0x55, 0xAA))]
    is_kept = kept[0] & kept[1] & kept[2]
    is_unknown = (bits[2] != bits[3]).any(1) & ~is_kept
    is_wrong = (bits[0] != bits[1]).any(1) & ~is_unknown & ~is_kept
    wrong, unknown, kept_count = int(is_wrong.sum()), int(is_unknown.sum()), int(is_kept.sum())
    of = f"of {counted(served.numel(), 'element')} of shape {tuple(served.shape)}"
    difference = ""
    if wrong:
        place = [*map(int, torch.unravel_index(is_wrong.nonzero()[0, 0], served.shape))]
        difference = f"differs in {wrong} {of}, the first at {tuple(place)}"
    why = [f"{kept_count} {of} aren't written when vLLM loads, in a round neither"] if kept_count else []
    why += [f"{unknown} {of} are made of memory that nothing wrote"] if unknown else []
    return difference, "; ".join(why)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value)
