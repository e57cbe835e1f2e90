"""Compare what all ranks say of a transfer's tensors. All ranks compare the same descriptions, find the same mistakes,
and raise the same error. Start at `Sides.of`, then `Sides.tensors`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ..distributed._mesh.text import of_ranks
from ..distributed.tensor._planner.boxes import Box
from .checkpoint import Contents, boxes_by_rank
from .descriptions import SIDES, Problem, Tensor
from .options import SAME
from .sharding import CASTS, on_several_meshes, replicated_sharding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from .descriptions import Description
    from .sharding import Sharding

SHOWN = 5  # problems in one error
# Under these names a module holds another, of which it is a compiled or a wrapped form.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


class Sides(NamedTuple):
    """What all ranks together give: of each tensor, which rank has which part.

    Attributes:
        source, target: the shardings, by name.
        replicated: the boxes of plain sources and of pieces that several ranks give, by name. Their values have to be
            equal.
    """

    source: dict[str, Sharding]
    target: dict[str, Sharding]
    replicated: dict[str, frozenset[Box]]

    @staticmethod
    def of(descriptions: Mapping[int, Description], gone: frozenset[int] = frozenset()) -> Sides:
        """Put the descriptions of all ranks together."""
        check_ranks(descriptions)
        distinct = distinct_descriptions(descriptions)
        joined = Sides({}, {}, {})
        problems: list[Problem] = []
        for side, shardings in zip(SIDES, joined[:2]):
            for names in _alike(distinct, side):
                sharding, is_plain, texts = _join(names[0], side, distinct, gone)
                shardings |= dict.fromkeys(names, sharding)
                boxes = replicated_boxes(sharding, is_plain) if side == "source" else ()
                if boxes:
                    joined.replicated.update(dict.fromkeys(names, boxes))
                for name in names if texts else ():
                    problems += [Problem(0, SIDES.index(side), name, t) for t in _join(name, side, distinct, gone)[2]]
        raise_if_any([problem.text for problem in sorted(problems, key=lambda problem: problem[:3])])
        return joined

    def tensors(self, strict: bool = True) -> tuple[list[Tensor], dict[str, tuple[str, ...]]]:
        """Compare both sides. Returns the tensors that both have, and the names that only one side has."""
        sides = self.source, self.target
        both = sorted(self.source.keys() & self.target.keys())
        alone = {name: tuple(sorted(side.keys() - set(both))) for name, side in zip(SIDES, sides)}
        texts = [] if strict or both else ["they have no name in common"]
        # Without a common name, the error lists the names of both sides: they often differ by a prefix.
        fit: set[tuple[int, int]] = set()  # tensors with equal shardings, of which a model has many, are compared once
        for name in both if not strict and both else sorted({*self.source, *self.target}):
            source, target = self.source.get(name), self.target.get(name)
            if (id(source), id(target)) not in fit:
                wrong = differences(name, source, target)
                texts += wrong
                fit |= set() if wrong else {(id(source), id(target))}
        raise_if_any(texts, renamed=renaming(self.source.keys(), self.target.keys()) if texts else None)
        return [Tensor(name, self.source[name], self.target[name]) for name in both], alone

    def read_from(self, contents: Contents, descriptions: Mapping[int, Description]) -> Sides:
        """Return the same with a checkpoint as the source: each reader has all of each tensor."""
        if self.source:
            others = sorted(rank for rank, description in descriptions.items() if description.source)
            raise ValueError(
                f"The source of a transfer is a checkpoint on {of_ranks(contents.ranks)}, and tensors on "
                f"{of_ranks(others)}: give the same kind, or None, on all ranks."
            )
        by_name = {}
        for name, number in contents.numbers.items():
            entry, target = contents.entries[number], self.target.get(name)
            device = "cpu" if target is None else target.device
            by_name[name] = replicated_sharding(entry.dtype, entry.shape, contents.ranks, device)
        return self._replace(source=by_name)


def check_ranks(descriptions: Mapping[int, Description]) -> None:
    """Check that every rank can take part, and that all give the same options."""
    if all(description.gives_nothing for description in descriptions.values()):
        raise ValueError(
            f"A Transfer needs a source and a target, and got None for both on {of_ranks(sorted(descriptions))}, which "
            "are all that make it: give the tensors on the ranks that have them."
        )
    problems = {rank: [d.problem] for rank, d in sorted(descriptions.items()) if d.problem is not None}
    raise_if_any(by_sentence(problems))
    _check_options(descriptions)


def contents_of(descriptions: Mapping[int, Description]) -> Contents | None:
    """Return the checkpoint that is the source; None if tensors are."""
    return Contents.of({rank: d.checkpoint for rank, d in descriptions.items() if d.checkpoint is not None})


def _check_options(descriptions: Mapping[int, Description]) -> None:
    """Check that all ranks give the same options, but for those that belong to a rank.

    With `strict` on some ranks only, these would stop at a name that only one side has, and the others would wait.
    """
    for option in SAME:
        by_value: dict[object, list[int]] = {}
        for rank, description in sorted(descriptions.items()):
            by_value.setdefault(getattr(description.options, option, None), []).append(rank)
        if len(by_value) > 1:
            given = ", and ".join(f"{option}={value} on {of_ranks(ranks)}" for value, ranks in by_value.items())
            raise ValueError(f"All ranks of a Transfer give the same {option}=; got {given}.")


def distinct_descriptions(descriptions: Mapping[int, Description]) -> list[tuple[Description, list[int]]]:
    """Return each description once, with the ranks that gave it: all ranks of a mesh say the same of its tensors."""
    by_id: dict[int, tuple[Description, list[int]]] = {}
    for rank, description in sorted(descriptions.items()):
        by_id.setdefault(id(description), (description, []))[1].append(rank)
    return [*by_id.values()]


def _alike(descriptions: Sequence[tuple[Description, list[int]]], side: str) -> list[list[str]]:
    """Group the names of one side that every rank describes alike: the 128 experts of a layer differ in names alone.

    Each rank knows a name once, so that tens of thousands of tensors on hundreds of ranks take a second or two.
    """
    said: dict[str, list[int]] = {}
    for number, (description, _) in enumerate(descriptions):
        for name, sharding in getattr(description, side).items():
            # A description has one object for equal shardings, as `from_data` makes it.
            said.setdefault(name, []).extend((number, id(sharding)))
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, numbers in said.items():
        groups.setdefault(tuple(numbers), []).append(name)
    return [*groups.values()]


def _join(
    name: str, side: str, descriptions: Sequence[tuple[Description, list[int]]], gone: frozenset[int]
) -> tuple[Sharding, bool, list[str]]:
    """Put together what ranks say of one side of a tensor: pieces and plain tensors get the ranks that gave them. Also
    returns whether it is a plain tensor, and what is wrong with it."""
    by_sharding: dict[Sharding, list[int]] = {}
    for description, ranks in descriptions:
        if name in (of_side := getattr(description, side)):
            by_sharding.setdefault(of_side[name], []).extend(ranks)
    texts: list[str] = []
    _join_pieces(by_sharding)
    # A plain tensor: the ranks that described it are its replicas.
    is_plain = len(by_sharding) == 1 and not (plain := next(iter(by_sharding))).ranks
    if is_plain:
        ranks = sorted(by_sharding.pop(plain))
        by_sharding[replicated_sharding(plain.dtype, tuple(plain.regions.shape), ranks, plain.device)] = ranks
    if len(by_sharding) > 1 and (joined := on_several_meshes(by_sharding)) is not None:
        ranks = sorted(itertools.chain(*by_sharding.values()))
        by_sharding = {joined: ranks}
    if side == "target" and len(by_sharding) > 1 and (listed := _listed(by_sharding)) is not None:
        by_sharding = {listed: [*listed.ranks]}
    if len(by_sharding) > 1:
        # Shardings that print alike are named once, with the ranks of all of them.
        views: dict[str, list[int]] = {}
        is_apart = len({sharding.device for sharding in by_sharding}) > 1
        for sharding, ranks in by_sharding.items():
            views.setdefault(f"{sharding} on {sharding.device}" if is_apart else str(sharding), []).extend(ranks)
        said = ", and ".join(f"{view} on {of_ranks(sorted(ranks))}" for view, ranks in views.items())
        texts.append(f"the {side} {name!r} is {said}")
    known = {rank for ranks in by_sharding.values() for rank in ranks}
    (sharding, (rank, *_)), *_ = by_sharding.items()
    missing = [other for other in sharding.ranks if other not in known and other not in gone]
    # The others would wait in an exchange for a rank of the mesh that gives None for the tensor.
    if missing:
        lack = f"{of_ranks(missing)} {_do_or_does(missing)}n't have it"
        texts.append(f"the {side} {name!r} of rank {rank} is {sharding}, and {lack}")
    return sharding, is_plain, texts


def replicated_boxes(source: Sharding, is_plain: bool) -> frozenset[Box]:
    """Return the boxes that several ranks give of a plain source, or that stand several times among the pieces of
    one."""
    if is_plain:
        shape = tuple(source.regions.shape)
        return frozenset([Box((0,) * len(shape), shape)] if len(source.ranks) > 1 else [])
    counts = Counter(box for boxes in source.pieces for box in boxes if box.elements)
    return frozenset([box for box, count in counts.items() if count > 1])


def _listed(by_sharding: Mapping[Sharding, Sequence[int]]) -> Sharding | None:
    """Join the shardings of a target that ranks have in different ways, as servers of other sizes do: each rank gets
    what its own says. None if they are of different tensors, or a rank of a mesh lacks it."""
    first, *_ = by_sharding
    alike = replicated_sharding(first.dtype, tuple(first.regions.shape), (), first.device)
    boxes: dict[int, tuple[Box, ...]] = {}
    for sharding, ranks in by_sharding.items():
        shape = tuple(sharding.regions.shape)
        if alike != replicated_sharding(sharding.dtype, shape, (), sharding.device) or sharding.regions.pending:
            return None
        own = sharding.pieces[0] if sharding.pieces else (Box((0,) * len(shape), shape),)
        of_mesh = boxes_by_rank(sharding) if sharding.ranks else dict.fromkeys(ranks, own)
        if {*of_mesh} != {*ranks} or not boxes.keys().isdisjoint(of_mesh):
            return None
        boxes |= of_mesh
    return alike._replace(ranks=tuple(sorted(boxes)), pieces=tuple([boxes[rank] for rank in sorted(boxes)]))


def _join_pieces(by_sharding: dict[Sharding, list[int]]) -> None:
    """Replace the shardings of one tensor, if all of them are pieces that each rank listed for itself, by one sharding
    that has the pieces of all ranks. Changes the dict; leaves it as it is if dtypes, shapes or devices differ."""
    without_pieces = {sharding._replace(pieces=()) for sharding in by_sharding}
    if len(without_pieces) > 1 or not all(sharding.pieces for sharding in by_sharding):
        return
    boxes = {rank: sharding.pieces[0] for sharding, ranks in by_sharding.items() for rank in ranks}
    ranks = sorted(boxes)
    by_sharding.clear()
    joined = without_pieces.pop()._replace(ranks=tuple(ranks), pieces=tuple([boxes[rank] for rank in ranks]))
    by_sharding[joined] = ranks


def by_sentence(problems: Mapping[int, Sequence[str]]) -> list[str]:
    """Write the problems of all ranks for an error, each sentence once, with the ranks that say it.

    >>> by_sentence({0: ["no memory"], 1: ["no memory", "no memory."], 2: ["no file"]})
    ['ranks 0, 1: no memory', 'rank 2: no file']
    """
    ranks: dict[str, list[int]] = {}
    for rank, sentences in problems.items():
        for sentence in dict.fromkeys([each.removesuffix(".") for each in sentences]):
            ranks.setdefault(sentence, []).append(rank)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for sentence, who in ranks.items():
        by_ranks.setdefault(tuple(who), []).append(sentence)
    return [f"{of_ranks(who)}: {'; '.join(sentences)}" for who, sentences in by_ranks.items()]


def _do_or_does(ranks: Sequence[int]) -> str:
    """Return the verb for a sentence about these ranks: "does" for one, else "do"."""
    return "does" if len(ranks) == 1 else "do"


def lacking(name: str, sides: Sequence[str]) -> str:
    """Say that the first of two sides has a name, and the second doesn't."""
    has, lacks = sides
    return f"the {has} has {name!r}, and the {lacks} doesn't"


def differences(name: str, source: Sharding | None, target: Sharding | None) -> Iterable[str]:
    """Say why the two sides of a tensor don't fit, in words; empty if they do. None stands for a side that lacks the
    name."""
    if source is None or target is None:
        return [lacking(name, SIDES if target is None else SIDES[::-1])]
    whole, part = source.regions.shape, target.regions.shape
    if whole != part:
        words = f"{name!r} has shape {whole} in the source and {part} in the target"
        if len(whole) == len(part) and all(size <= length for size, length in zip(part, whole)):
            words += " (if that is a part of it, say which with piece())"  # a server's shard as a plain tensor
        return [words]
    if source.dtype != target.dtype and not CASTS.issuperset((source.dtype, target.dtype)):
        return [
            f"{name!r} is {source.dtype} in the source and {target.dtype} in the target; only types among "
            f"{', '.join(sorted(CASTS))} are cast: convert it before"
        ]
    # From a checkpoint to a GPU this is no difference: its tensors take the device of their targets.
    if source.device != target.device:
        return [f"{name!r} is on {source.device} in the source and on {target.device} in the target"]
    if target.regions.pending:
        return [f"the target {name!r} has a pending reduction ({target.regions}), which nothing can be written into"]
    return []


def renaming(sources: AbstractSet[str], targets: AbstractSet[str]) -> str | None:
    """Find what keeps the names of two sides apart, where it is one prefix, or modules that wrap others.

    >>> renaming({"model.up", "model.norm", "head"}, {"up", "norm", "head"})
    "without 'model.'"
    """
    lacked, unused = targets - sources, sources - targets
    if not lacked or not unused:
        return None
    renamed: dict[str, set[str]] = {}  # what the source's names would be, by the change in words
    first, any_unused = min(lacked), min(unused)
    for name in sorted(targets):
        prefix = name.removesuffix(any_unused)
        if name.endswith(f".{any_unused}") and all(prefix + each in targets for each in unused):
            renamed[f"with {prefix!r} before them"] = {prefix + each for each in sources}
    for name in sorted(unused):
        prefix = name.removesuffix(first)
        if name.endswith(f".{first}") and all(each.startswith(prefix) for each in unused):
            renamed[f"without {prefix!r}"] = {each.removeprefix(prefix) for each in sources}
    for wrapper in WRAPPERS:
        renamed[f"without {wrapper!r}"] = {each.replace(wrapper, "") for each in sources}
    fitting = [words for words, names in renamed.items() if targets <= names and len(names) == len(sources)]
    return fitting[0] if fitting else None


def raise_if_any(
    problems: Sequence[str],
    count: int = 0,
    why: str = "The source and the target of a transfer don't fit",
    renamed: str | None = None,
) -> None:
    """Raise an error that names the first few problems, if there are any."""
    if problems:
        count = max(count, len(problems))
        more = f"; and {count - SHOWN} more" if count > SHOWN else ""
        is_lacking = any(problem.startswith(("the source has ", "the target has ")) for problem in problems[:SHOWN])
        fit = f" ({renamed} they fit)" if renamed else ""
        hint = f" names= maps the source's names{fit}; strict=False leaves out what one side lacks."
        raise ValueError(f"{why}: {'; '.join(problems[:SHOWN])}{more}.{hint if is_lacking else ''}")
