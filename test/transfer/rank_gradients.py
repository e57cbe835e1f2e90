"""Gradients of a redistributed tree are those of a loop over it: whichever results a loss uses, whichever tensors want
a gradient or stand in the tree twice, of the first and of the second order."""

import random

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from torch_overlay.distributed.tensor._runner.specs import read_cuts
from width import NIGHTLY

R, S, P = Replicate(), Shard, Partial()
# Before 2.12 a loop has no second derivatives, and makes more of a gradient whole than a tree.
TWICE = hasattr(_redistribute, "NestedRedistribute")
KINDS = ("backward", "in parts", "of some", "twice")[: 4 if TWICE else 3]
MESHES = ((range(WORLD), (4, 2)), (SHUFFLED, (2, 4)), (range(WORLD), (2, 2, 2)))


def leaf(mesh, whole, placements, order, wants):
    """A tensor cut as its placements and its shard order say; of a pending sum, each rank has the whole."""
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    if order is not None:
        spec = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta, shard_order=order)
    sizes = tuple(mesh.shape)
    cuts = read_cuts(placements, order, whole.ndim, sizes)
    box = cuts.on(tuple(whole.shape), sizes).box(mesh.get_coordinate())
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, start, length)
    local = whole.clone()
    return DTensor(local.requires_grad_(wants), spec, requires_grad=wants)


class Drawn:
    """A tree and a loss, of random kinds; the same on all ranks."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        ranks, sizes = self.rng.choice(MESHES)
        self.mesh = make_root(ranks, sizes, ("a", "b", "c")[: len(sizes)])
        self.tensors, self.targets, self.used = {}, {}, {}
        for number in range(self.rng.randint(2, 5)):
            name = f"w{number}"
            self.tensors[name] = self.tensor() if number < 2 or self.rng.random() < 0.7 else "w0"  # tied
            self.targets[name] = tuple(self.rng.choice((R, S(0), S(1))) for _ in sizes)
            self.used[name] = self.rng.random() < 0.6
        self.used[self.rng.choice([*self.used])] = True
        self.wants = {name: self.rng.random() < 0.7 for name in self.tensors}
        self.wants[next(name for name, used in self.used.items() if used)] = True
        self.wants["w0"] |= self.wants.get(next((n for n, t in self.tensors.items() if t == "w0"), "w0"))

    def __repr__(self):
        said = {name: what if what == "w0" else what[1:] for name, what in self.tensors.items()}
        return f"{said} to {self.targets} on {tuple(self.mesh.shape)}, used {self.used}, wants {self.wants}"

    def tensor(self):
        """A whole, placements, and a shard order of its own."""
        sizes = self.mesh.shape
        whole = torch.arange(96.0 if self.rng.random() < 0.5 else 35.0)
        whole = (whole.reshape(16, 6) if len(whole) == 96 else whole.reshape(7, 5)) % 11
        ordered = whole.shape[0] == 16 and self.rng.random() < 0.4
        if ordered:  # rows cut by the last axis first
            order = (_dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(len(sizes) - 1, 0)),)
            return whole, (S(0), *[R] * (len(sizes) - 2), S(0)), order
        return whole, tuple(self.rng.choice((R, S(0), S(1), P)) for _ in sizes), None

    def leaves(self):
        made = {}
        for name, what in self.tensors.items():
            made[name] = made["w0"] if what == "w0" else leaf(self.mesh, *what, self.wants[name])
        return made

    def loss(self, found, names, power):
        """Of the rank's parts."""
        terms = [(found[n].to_local() ** power * (number + 1)).sum() for number, n in enumerate(names)]
        return sum(terms)


def together(drawn, leaves):
    return torch_overlay.redistribute(leaves, placements=drawn.targets)


def one_by_one(drawn, leaves):
    return {name: tensor.redistribute(placements=drawn.targets[name]) for name, tensor in leaves.items()}


class GradientCases:
    """Cases for ``EightRanks``."""

    def outcome(self, drawn, way, kind):
        """What a program sees: which results want a gradient, and the gradients of the leaves, by name."""
        leaves = drawn.leaves()
        found = way(drawn, leaves)
        seen = {f"{name} wants": tensor.requires_grad for name, tensor in found.items()}
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        used = [name for name, is_used in drawn.used.items() if is_used]
        gradients = {}
        if kind == "backward":
            drawn.loss(found, used, 2).backward()
            gradients = {name: leaf.grad for name, leaf in leaves.items()}
        elif kind == "in parts":
            for name in used:
                loss = drawn.loss(found, [name], 2)
                if loss.requires_grad:
                    loss.backward()
            gradients = {name: leaf.grad for name, leaf in leaves.items()}
        elif kind == "of some":
            some = dict([*wanted.items()][:1])
            loss = drawn.loss(found, used, 2)
            gradients = dict(zip(some, torch.autograd.grad(loss, [*some.values()], allow_unused=True), strict=True))
        else:
            loss = drawn.loss(found, used, 3)
            first = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True, create_graph=True)
            gradients = dict(zip(wanted, first, strict=True))
            again = [gradient.to_local().square().sum() for gradient in first if gradient is not None]
            second = torch.autograd.grad(sum(again), [*wanted.values()], allow_unused=True)
            gradients |= {f"{name}, second": gradient for name, gradient in zip(wanted, second, strict=True)}
        for name, gradient in gradients.items():
            seen[name] = gradient is not None
            if gradient is not None:
                seen[f"{name}, whole"] = gradient.full_tensor().detach()
            if gradient is not None and TWICE:
                seen[f"{name}, placed"] = gradient.placements, gradient._spec.shard_order, gradient.to_local().detach()
        return seen

    def check_gradients(self, seed):
        drawn = Drawn(seed)
        for kind in KINDS:
            tree, loop = (self.outcome(drawn, way, kind) for way in (together, one_by_one))
            self.assertEqual(tree.keys(), loop.keys(), f"seed {seed}, {kind}")
            for what, want in loop.items():
                self.assertEqual(tree[what], want, msg=f"seed {seed}, {kind}: {what}: {drawn}")


# Four hundred at night.
for first in range(0, 400, 20) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (20 if NIGHTLY else 4))):
        for seed in seeds:
            self.check_gradients(seed)

    setattr(GradientCases, f"test_random_gradients_as_a_loop_{first:03}", check)
