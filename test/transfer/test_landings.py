"""Where a model's loader puts tensors of a checkpoint, against the loader itself."""

import copy
import json
import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forks
import torch_overlay
from torch_overlay.loading.landings import READ
from torch_overlay.loading.loader_run import ASKS, Meta
from vllm_stand_in import SMALL, SPARSE, Model
from way import needs_package

pytestmark = needs_package
TYPE = torch.float32


def metas_of(shapes):
    return [Meta(name, TYPE, tuple(shape)) for name, shape in shapes.items()]


def values_of(shapes):
    return {
        name: torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) + 1000 * number
        for number, (name, shape) in enumerate(shapes.items())
    }


def bring(found, values):
    """What a Transfer into `found.target()` does, and the loader after it."""
    for name, tensor in found.target().items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(values[name])
            continue
        for piece in tensor:
            box = tuple([slice(at, at + n) for at, n in zip(piece.start, piece._local_tensor.shape)])
            piece._local_tensor.copy_(values[name][box])
    found.load_whole()


def memory_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def attributes_of(model):
    """A copy of each module's plain attributes, by name."""
    own = [(prefix, vars(module)) for prefix, module in model.named_modules()]
    return {
        (prefix, key): copy.deepcopy(value)
        for prefix, attributes in own
        for key, value in attributes.items()
        if not key.startswith("_")
    }


def set_attributes(model, attributes):
    for prefix, module in model.named_modules():
        for key in [key for key in vars(module) if not key.startswith("_")]:
            del vars(module)[key]
        vars(module).update({key: copy.deepcopy(value) for (at, key), value in attributes.items() if at == prefix})


def same_attributes(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.device == other.device and same_bits(one, other)
    if isinstance(one, types.SimpleNamespace):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_attributes(one[key], other[key]) for key in one)
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):  # a copy is another object
        return type(one) is type(other) and same_attributes(vars(one), vars(other))
    return one == other


def check(model, load, shapes, values=None):
    """Landings bring the model to what its loader makes of it, bit by bit, and asking for them changes nothing."""
    memory, attributes = memory_of(model), attributes_of(model)
    before = {name: tensor.clone() for name, tensor in memory.items()}
    found = torch_overlay.landings(load, model, metas_of(shapes))
    assert all(memory_of(model)[name] is tensor for name, tensor in memory.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.items()), "asking changed the model"
    assert same_attributes(attributes_of(model), attributes), "asking changed attributes"
    values = values or values_of(shapes)
    bring(found, values)
    got, got_attributes = {name: tensor.clone() for name, tensor in memory.items()}, attributes_of(model)
    for name, tensor in memory.items():
        tensor.data.copy_(before[name])
    set_attributes(model, attributes)
    with torch.no_grad():
        load([*values.items()])
    for name, tensor in memory.items():
        assert same_bits(got[name], tensor), name
    assert same_attributes(got_attributes, attributes_of(model)), (got_attributes, attributes_of(model))
    return found


def same_bits(one, other):
    return torch.equal(*[each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (one, other)])


@pytest.mark.parametrize("sizes", [SMALL, SPARSE])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_gets_what_its_loader_would_cut(sizes, tp):
    for rank in range(tp):
        model = Model(sizes, tp, rank)
        for param in model.parameters():
            param.fill_(7.0)  # which padding has, too, until the loader fills it
        shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
        found = check(model, model.load_weights, shapes)
        assert not found.whole and not found.untouched
        # Of the vocabulary's 150 rows, padded to 192, the last of four ranks has only six: all have some.
        assert len(found.direct) == len(shapes) and not found.skipped


def module_of(**tensors):
    """A module of parameters, one a submodule where the name has a dot."""
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition("__")
        if owner and not hasattr(model, owner):
            model.add_module(owner, torch.nn.Module())
        its = getattr(model, owner) if owner else model
        setattr(its, key, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def loader(**by_name):
    """A loader of a function for each name. Of another name it raises a KeyError."""

    def load(weights):
        for name, weight in weights:
            by_name[name](weight)

    return load


def zeros(*shape, dtype=TYPE):
    return torch.zeros(shape, dtype=dtype)


# By name: what the loader does with a weight of shape (4, 6) and a model of `a` (4, 6), `b` (6, 4), `c` (8, 6).
DIRECT = {
    "plain": lambda m, w: m.a.data.copy_(w),
    "no_grad": lambda m, w: m.a.copy_(w),
    "assigned": lambda m, w: m.a.data.__setitem__(slice(None), w),
    "turned": lambda m, w: m.b.data.copy_(w.t()),
    "turned_copy": lambda m, w: m.b.data.copy_(w.t().contiguous()),
    "into_turned": lambda m, w: m.b.data.t().copy_(w),
    "cut": lambda m, w: m.a.data[:2, 1:3].copy_(w[2:, 3:5]),
    "cut_of_copy": lambda m, w: m.a.data[:2, 1:3].copy_(w.to("cpu", copy=True)[2:, 3:5]),
    "cut_of_turned_copy": lambda m, w: m.b.data[:2].copy_(w.t().contiguous()[2:4]),
    "copied_thrice": lambda m, w: m.b.data[1:3, :2].copy_(w[1:3].clone().t().contiguous()[2:4].clone()),
    "chunks": lambda m, w: [m.c.data[2 * at : 2 * at + 2].copy_(part) for at, part in enumerate(w.chunk(2))],
    "rows": lambda m, w: [m.c.data[7 - at].copy_(row) for at, row in enumerate(w)],
    "to_two_places": lambda m, w: [m.c.data[:4].copy_(w), m.c.data[4:].copy_(w)],
    "with_dims_of_one": lambda m, w: m.a.data.unsqueeze(1).copy_(w[:, None]),
    "every_other_column_of_the_model": lambda m, w: m.c.data[:4, ::2].copy_(w[:, :3]),
    "padded": lambda m, w: [m.c.data[:4].copy_(w), m.c.data[4:].zero_()],
    "foreach": lambda m, w: torch._foreach_copy_([m.a.data[:2], m.a.data[2:]], [w[2:], w[:2]]),
    "before_it_is_zeroed": lambda m, w: [m.a.data.copy_(w), w.zero_(), m.c.data[:4].copy_(w.clone())],
    "beside_a_copy_that_is_zeroed": lambda m, w: [m.c.data[:2].copy_(w[:2].clone().zero_()), m.c.data[4:].copy_(w)],
    "nothing": lambda m, w: None,
    "zeroed": lambda m, w: m.b.data.t()[1:].copy_(w.zero_()[1:]),
}


@pytest.mark.parametrize("name", DIRECT)
def test_what_only_cuts_turns_and_copies_is_direct(name):
    model = module_of(a=zeros(4, 6), b=zeros(6, 4), c=zeros(8, 6))
    found = check(model, loader(w=lambda w: DIRECT[name](model, w)), {"w": (4, 6)})
    assert not found.whole and found.skipped == (("w",) if name in ("nothing", "zeroed") else ())


# As above; each ends otherwise than a cut would.
WHOLE = {
    "scaled": lambda m, w: m.a.data.copy_(w * 2),
    "scaled_in_place": lambda m, w: m.a.data.copy_(w.mul_(2)),
    "scaled_copy": lambda m, w: m.a.data.copy_(w.clone().mul_(2)),
    "scaled_after": lambda m, w: [m.a.data.copy_(w), m.a.data.mul_(2)],
    "zeroed_in_part": lambda m, w: [w[:3].zero_(), m.a.data.copy_(w)],
    "zeroed_and_added_to": lambda m, w: m.a.data.copy_(w.zero_().add_(1)),
    "by_the_model": lambda m, w: m.a.data.copy_(w * m.c.data[:4]),
    "added_up": lambda m, w: m.a.data.add_(w),
    "by_out": lambda m, w: [torch.mul(w, 2, out=w), m.a.data.copy_(w)],
    "computed_into_the_model": lambda m, w: torch.mul(w, 2, out=m.a.data),
    "gathered": lambda m, w: m.a.data.copy_(w[torch.tensor([3, 1, 2, 0])]),
    "every_other": lambda m, w: m.a.data[:2].copy_(w[::2]),
    "flat": lambda m, w: m.b.data.copy_(w.reshape(6, 4)),
    "broadcast": lambda m, w: m.a.data.copy_(w[:1]),
    "rounded": lambda m, w: m.a.data.copy_(w.half().float()),
    "numbers": lambda m, w: m.a.data.copy_(w.int()),
    "bits": lambda m, w: m.a.data.view(torch.int32).copy_(w.view(torch.int32)),
    "twice": lambda m, w: [m.a.data[:3].copy_(w[:3]), m.a.data[1:].copy_(w[:3])],
    "zeroed_after": lambda m, w: [m.a.data.copy_(w), m.a.data[2:].zero_()],
    "zeroed_before": lambda m, w: [m.a.data.zero_(), m.a.data[2:].copy_(w[2:])],
    "passed_on": lambda m, w: [m.a.data.copy_(w), m.c.data[:4].copy_(m.a.data)],
    "by_a_buffer": lambda m, w: (lambda room: [room.copy_(w), m.a.data.copy_(room)])(torch.empty(4, 6)),
    "by_a_sum": lambda m, w: (lambda room: [room.add_(w), m.a.data.copy_(room)])(torch.zeros(4, 6)),
    "row_moved": lambda m, w: [w[0].copy_(w[1]), m.a.data.copy_(w)],
    "joined": lambda m, w: m.c.data.copy_(torch.cat([w, w])),
    "with_a_buffer_where_it_is": lambda m, w: m.a.data.copy_(w + torch.ones(6, device=w.device) * m.a.data[0].exp()),
    "deeply_copied_buffer": lambda m, w: m.a.data.copy_(copy.deepcopy(torch.zeros(4, 6).copy_(w))),
    "scaled_foreach": lambda m, w: torch._foreach_copy_([m.a.data], [w * 2]),
    "by_two_outs": lambda m, w: torch.max(w, 1, out=(m.a.data[:, 0], torch.empty(4, dtype=torch.int64))),
    "zeroed_on_its_device": lambda m, w: [w.to("cpu").zero_(), m.a.data.copy_(w)],
    "zeroed_after_it_went_there": lambda m, w: [moved := w.to("cpu"), w.zero_(), m.c.data[:4].copy_(moved)],
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_more_than_a_cut_comes_whole(name):
    model = module_of(a=zeros(4, 6), b=zeros(6, 4), c=zeros(8, 6))
    values = {"w": torch.arange(24.0).reshape(4, 6) + 0.1}
    given = {"w": values["w"].clone()}  # some loaders change what they get
    shapes = {"w": (4, 6)}
    found = torch_overlay.landings(loader(w=lambda w: WHOLE[name](model, w)), model, metas_of(shapes))
    assert set(found.whole) == {"w"} and not found.direct
    assert not any(tensor.any() for tensor in memory_of(model).values()), "asking changed the model"
    bring(found, given)
    got = {name: tensor.clone() for name, tensor in memory_of(model).items()}
    for tensor in memory_of(model).values():
        tensor.zero_()
    WHOLE[name](model, values["w"])
    assert all(same_bits(got[key], tensor) for key, tensor in memory_of(model).items())


def test_a_tensor_that_is_overwritten_by_another_comes_whole():
    model = module_of(a__w=zeros(4, 6), b__w=zeros(4, 6))

    def load(weights):
        weights = dict(weights)
        if len(weights) == 2:
            torch._foreach_copy_([weights["a"]], [weights["b"]])
        for name, weight in weights.items():
            getattr(model, name).w.data.copy_(weight)

    assert set(check(model, load, dict.fromkeys("ab", (4, 6))).whole) == {"a", "b"}


def test_types_are_cast_as_copy_does_and_others_come_whole():
    model = module_of(a=zeros(4, 6, dtype=torch.bfloat16), n=zeros(4, 6, dtype=torch.int32), z=zeros(4, 6).cfloat())
    put = lambda name: lambda w: getattr(model, name).data.copy_(w)
    load = loader(a=put("a"), n=put("n"), z=lambda w: model.z.data.copy_(torch.complex(w, w)))
    found = torch_overlay.landings(load, model, metas_of(dict.fromkeys("an", (4, 6))))
    assert not found.direct  # one module
    found = torch_overlay.landings(load, model, metas_of({"a": (4, 6)}))
    assert set(found.direct) == {"a"}
    values = {"a": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))}
    bring(found, values)
    assert same_bits(model.a, values["a"].bfloat16())


def test_what_is_turned_into_its_conjugate_comes_whole():
    """A view, with the same memory, that shows other values."""
    model = module_of(z=torch.zeros(4, dtype=torch.cfloat), y=torch.zeros(4, dtype=torch.cfloat))
    meta = [Meta("z", torch.cfloat, (4,))]
    for turn in (torch.conj, lambda w: torch.conj(w).clone(), torch._neg_view):
        found = torch_overlay.landings(loader(z=lambda w, turn=turn: model.z.data.copy_(turn(w))), model, meta)
        assert set(found.whole) == {"z"}
    assert torch_overlay.landings(loader(z=lambda w: model.z.data.copy_(w)), model, meta).direct
    assert torch_overlay.landings(loader(z=lambda w: model.z.data.conj().copy_(w)), model, meta).whole


def test_a_scalar_and_an_empty_tensor():
    model = module_of(one=zeros(1), none=zeros(0, 4), rows=zeros(3, 4))
    load = loader(
        scalar=lambda w: model.one.data.copy_(w.view(1)),
        none=lambda w: model.none.data.copy_(w),
        cut=lambda w: model.rows.data[3:].copy_(w[2:]),
    )
    found = check(model, load, {"scalar": (), "none": (0, 4), "cut": (2, 4)})
    assert set(found.direct) == {"scalar"} and found.skipped == ("none", "cut") and found.untouched == {"rows": 12}


def test_one_name_to_two_types_comes_whole():
    """The pieces of one tensor in a Transfer have one type."""
    model = module_of(a=zeros(4), b=zeros(4, dtype=torch.bfloat16))
    found = check(model, loader(w=lambda w: [model.a.data.copy_(w), model.b.data.copy_(w)]), {"w": (4,)})
    assert found.whole == {"w": "it goes to memory of several types or devices"}


def test_places_that_overlap_come_whole_and_so_does_all_of_their_module():
    model = module_of(a__w=zeros(4, 6), a__b=zeros(6), c__w=zeros(4, 6))
    load = loader(
        top=lambda w: model.a.w.data[:3].copy_(w),
        low=lambda w: model.a.w.data[2:].copy_(w),
        bias=lambda w: model.a.b.data.copy_(w),
        left=lambda w: model.c.w.data[:, :2].copy_(w),  # shares rows of memory with the next, and no element
        right=lambda w: model.c.w.data[:, 2:].copy_(w),
    )
    found = check(model, load, {"top": (3, 6), "low": (2, 6), "bias": (6,), "left": (4, 2), "right": (4, 4)})
    assert set(found.direct) == {"left", "right"}
    shared, beside = "another tensor goes to the same memory", "another tensor of its module comes whole"
    assert found.whole == {"top": shared, "low": shared, "bias": beside}


def test_columns_of_memory_that_only_seem_to_overlap_are_direct():
    model = module_of(w=zeros(8, 8))
    places = [(slice(a, a + 4), slice(b, b + 4)) for a in (0, 4) for b in (0, 4)]
    load = loader(**{f"w{n}": lambda w, n=n: model.w.data[places[n]].copy_(w) for n in range(4)})
    assert len(check(model, load, {f"w{n}": (4, 4) for n in range(4)}).direct) == 4


def test_places_that_go_on_in_the_next_row_overlap():
    """Rows of four, six apart, from element 0 and from element 4: the last of both wrote."""
    model = module_of(flat=zeros(16))
    load = loader(
        a=lambda w: model.flat.data[:12].view(2, 6)[:, :4].copy_(w),
        b=lambda w: model.flat.data[4:].view(2, 6)[:, :4].copy_(w),
    )
    for names in ("ab", "ba"):
        assert set(check(model, load, dict.fromkeys(names, (2, 4))).whole) == {"a", "b"}


@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_fill_over_what_another_tensor_brings_is_left_to_the_loader(order, zeroes):
    """It zeroes a fused weight for each of its parts: only the last one stays."""
    model = module_of(w=torch.full((4, 2), 7.0), other__w=zeros(2, 2))
    load = loader(
        a=lambda w: [model.w.data.zero_(), model.w.data[:2].copy_(w)],
        b=lambda w: [model.w.data.zero_(), model.w.data[2:].copy_(w)],
        c=lambda w: [model.other.w.data.copy_(w), model.w.data[1:3].zero_() if zeroes else None],
    )
    found = check(model, load, dict.fromkeys((*order, "c"), (2, 2)))
    assert set(found.whole) == ({"a", "b", "c"} if zeroes else {"a", "b"})


def test_a_fill_beside_something_computed_is_known_by_who_does_it():
    """Of all in one call nobody knows whose the fill is."""
    model = module_of(w=torch.full((4, 2), 7.0), b=zeros(4), pad__w=torch.full((4, 2), 7.0))
    load = loader(
        w=lambda w: [model.w.data[:2].copy_(w), model.w.data[2:].fill_(3)],
        b=lambda w: model.b.data.copy_(w.exp()),
        pad=lambda w: [model.pad.w.data[:2].copy_(w), model.pad.w.data[2:].fill_(4)],
    )
    found = check(model, load, {"w": (2, 2), "b": (4,), "pad": (2, 2)})
    assert set(found.whole) == {"w", "b"} and set(found.direct) == {"pad"} and len(found.fills) == 1
    assert not found.untouched


def test_what_a_loader_keeps_or_puts_in_the_model_comes_whole_and_the_model_stays():
    model, kept = module_of(a=zeros(4, 6), b=zeros(4, 6)), {}
    memory = memory_of(model)
    into = {
        "kept": lambda w: kept.update(w=w[1:]),
        "kept as it is": lambda w: kept.update(w=w),
        "a copy kept": lambda w: kept.update(w=w.clone()),
        "put": lambda w: setattr(model, "a", torch.nn.Parameter(w, requires_grad=False)),
        "as_data": lambda w: setattr(model.a, "data", w),
        "fresh": lambda w: [setattr(model.a, "data", torch.zeros(4, 6)), model.a.data.copy_(w)],
        "new": lambda w: setattr(model, "c", torch.nn.Parameter(w, requires_grad=False)),
    }
    for name, function in into.items():
        load = loader(w=function, b=lambda w: model.b.data.copy_(w))
        found = torch_overlay.landings(load, model, metas_of(dict.fromkeys("wb", (4, 6))))
        assert set(found.whole) == {"w", "b"}, name
        assert memory_of(model).keys() == memory.keys()
        assert all(memory_of(model)[key] is memory[key] and not memory[key].is_meta for key in memory), name
        kept.clear()


def test_a_cycle_that_nobody_holds_keeps_nothing():
    """As a function within the loader that calls itself, with the tensors in its frame."""
    model = module_of(a=zeros(4, 6))

    def load(weights):
        def rest(left):
            if left:
                model.a.data.copy_(weights[-len(left)][1])
                rest(left[1:])

        weights = list(weights)
        rest(weights)

    assert not check(model, load, {"a": (4, 6)}).whole


@pytest.mark.parametrize("asks", ["nothing", "one value", "values together"])
@pytest.mark.parametrize("place", ["the loader's", "the model's"])
def test_what_is_put_together_from_several_comes_whole_where_each_is_asked_for_alone(place, asks):
    """Each alone goes nowhere. They are asked for alone because of the fill below the embedding, or of a value."""
    model = module_of(fused=zeros(8, 6), embed=zeros(10, 6), scale=zeros(1), last=zeros(6))
    kept_by_model = {}

    def load(weights):
        kept = {} if place == "the loader's" else kept_by_model
        names = set()
        for name, weight in weights:
            names.add(name)
            if name == "embed":
                model.embed.data.zero_()
                model.embed.data[:8].copy_(weight)
            elif name == "scale":
                model.scale.data.fill_(weight.item() if asks == "one value" else 1.0)
            elif name == "last":
                model.last.data.copy_(weight)
            else:
                kept[name] = weight
            if len(kept) == 2:
                model.fused.data.copy_(torch.cat([kept.pop("q"), kept.pop("k")]))
        if asks == "values together" and len(names) > 1:
            assert weight.sum().item() != 0

    check(model, load, {"q": (4, 6), "k": (4, 6), "embed": (8, 6), "scale": (1,), "last": (6,)})


def fills_an_empty_slot(model, tensor):
    model[0].bias = torch.nn.Parameter(tensor.new_zeros(4))


def replaces_a_layer(model, tensor):
    model[0] = torch.nn.Linear(4, 4, bias=False, device="meta")


def removes_a_layer(model, tensor):
    del model[1]


def adds_a_buffer(model, tensor):
    model.register_buffer("more", tensor.new_zeros(2))


@pytest.mark.parametrize("change", [fills_an_empty_slot, replaces_a_layer, removes_a_layer, adds_a_buffer])
def test_what_a_loader_makes_of_the_modules_is_taken_back(change):
    """Asking it leaves the model as it was; and nothing of what it took in hand is direct."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    layers, weights, slots = [*model], [layer.weight for layer in model], [*model[0]._parameters]

    def load(pairs):
        for name, tensor in pairs:
            layers[int(name[0])].weight.data.copy_(tensor)
            if name[0] == "0":
                change(model, tensor)

    found = torch_overlay.landings(load, model, metas_of({"0.weight": (4, 4), "1.weight": (4, 4)}))
    assert [*model] == layers and all(layer.weight is weight for layer, weight in zip(layers, weights))
    assert model[0].bias is None and [*model[0]._parameters] == slots and not [*model.buffers()]
    assert set(found.whole) == {"0.weight", "1.weight"} and not found.direct


def test_a_loader_that_does_otherwise_the_second_time_is_not_believed():
    model, calls = module_of(a=zeros(4, 6), b__w=zeros(4, 6)), []

    def load(weights):
        calls.append(1)
        for name, weight in weights:
            into = model.a if name == "a" else model.b.w
            into.data[:2].copy_(weight[:2] if len(calls) == 1 or name == "b" else weight[2:])

    found = torch_overlay.landings(load, model, metas_of(dict.fromkeys("ab", (4, 6))))
    assert found.whole == {"a": "its loader does otherwise when it is asked again"} and set(found.direct) == {"b"}


class Tied(torch.nn.Module):
    """A head that is the embedding, and a loader that refuses it alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(6, 4), torch.nn.LayerNorm(4)
        self.head = self.embed

    def load_weights(self, weights):
        seen = set()
        for name, weight in weights:
            seen.add(name)
            if name == "head":
                if "embed" not in seen:
                    raise ValueError("the embedding is missing")
                continue
            (self.embed.weight if name == "embed" else getattr(self.norm, name)).data.copy_(weight)


SHAPES = {"embed": (6, 4), "weight": (4,), "bias": (4,), "head": (6, 4)}


@pytest.mark.parametrize("does", ["nothing", "scales", "scales for the head", "fills for the head"])
def test_a_tied_head_that_is_refused_alone_does_not_make_all_come_whole(does):
    """Also where all in one call can't be told apart, since something is written that no tensor takes part in."""
    model = Tied()

    def load(weights):
        model.load_weights(weights)
        for name, _ in weights:
            if (does == "scales" and name == "bias") or (does == "scales for the head" and name == "head"):
                model.norm.bias.data.mul_(2)
            elif does == "fills for the head" and name == "head":
                model.norm.bias.data.fill_(2)

    found = check(model, load, SHAPES)
    # A head that comes whole is refused without its embedding, so all do.
    assert set(found.whole) == {"nothing": set(), "scales": {"weight", "bias"}}.get(does, set(SHAPES))
    assert found.skipped == (() if found.whole.keys() == SHAPES.keys() else ("head",)) and not found.untouched


def test_what_comes_whole_only_with_the_others_takes_all_with_it():
    model = Tied()

    def load(weights):
        model.load_weights(weights)
        for name, weight in weights:
            if name == "head":
                model.norm.bias.data.copy_(weight[0].exp())

    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    assert set(check(model, load, SHAPES, values).whole) == set(SHAPES)


class Counts(Model):
    """Refuses to be given less than all, as models with a draft head do."""

    needs = 0

    def load_weights(self, weights):
        came = 0
        for pair in weights:
            super().load_weights([pair])
            came += 1
        if came < self.needs:
            raise ValueError(f"{self.needs - came} tensors are missing")


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_loader_that_counts_is_asked_with_all_names(lacks):
    model = Counts(SPARSE, 1, 0)
    shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
    model.needs = len(shapes) + lacks
    if lacks:
        with pytest.raises(ValueError, match=r"refuses .* more, with ValueError: 1 tensors are missing"):
            torch_overlay.landings(model.load_weights, model, metas_of(shapes))
    else:
        assert len(check(model, model.load_weights, shapes).direct) == len(shapes)


def test_names_that_the_loader_does_not_know_are_an_error_with_all_of_them():
    model = Model(SPARSE, 1, 0)
    shapes = {name: shape for name, (shape, _) in model.checkpoint().items()} | {"0.rotary": (2,), "unknown": (2,)}
    words = "takes all .*, and that of Model refuses '0.rotary', 'unknown', with AttributeError: .* Leave out what this"
    with pytest.raises(ValueError, match=words):
        torch_overlay.landings(model.load_weights, model, metas_of(shapes))
    assert not any(param.any() for param in model.parameters())


LOOKS = {
    "isnan": lambda w: bool(w.isnan().any()),
    "numpy": lambda w: w.numpy(),
    "tolist": lambda w: w.tolist(),
    "mask": lambda w: w[w > 0],
    "item": lambda w: w[0, 0].item(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_loader_that_looks_at_values_gets_all(name):
    """What else it would have done nobody knows."""
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6))
    put = {"a": lambda w: [LOOKS[name](w), model.a.data.copy_(w)], "b": lambda w: model.b.w.data.copy_(w)}
    found = check(model, loader(**put), dict.fromkeys("ab", (4, 6)))
    assert set(found.whole) == {"a", "b"}


@pytest.mark.parametrize("name", LOOKS)
def test_a_loader_that_looks_at_values_and_catches_the_error_gets_all(name):
    """With the value it does otherwise than without. It did nothing else, so that it counted as direct."""
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6))

    def look(weight):
        try:
            LOOKS[name](weight)
            return 2
        except Exception:
            return 1

    def put(w):
        factor = look(w)
        model.a.data.copy_(w if factor == 1 else w * factor)

    found = check(model, loader(a=put, b=lambda w: model.b.w.data.copy_(w)), dict.fromkeys("ab", (4, 6)))
    assert set(found.whole) == {"a", "b"}


def put(model, name, weight, at=0):
    (model.s.data if name == "s" else model.a.w.data[at:][: len(weight)]).copy_(weight)


def scaled_by_another(model, weights):
    if "a" in weights:
        put(model, "a", weights["a"] * 2 if "s" in weights and weights["s"].item() > 1 else weights["a"])


def put_by_another(model, weights):
    if "s" in weights and weights["s"].item() > 1 and "a" in weights:
        put(model, "a", weights["a"])


def put_once(model, weights, address=torch.Tensor.data_ptr):
    seen = set()
    for name, weight in weights.items():
        if address(weight) not in seen:
            seen.add(address(weight))
            put(model, name, weight)


def put_once_by_storage(model, weights):
    put_once(model, weights, lambda weight: weight.untyped_storage().data_ptr())


def placed_by_what_came(model, weights):
    for name, weight in weights.items():
        put(model, name, weight, int(model.s))


def placed_by_the_length_of_what_came(model, weights):
    for name, weight in weights.items():
        put(model, name, weight, len(model.s.view(1).nonzero()))


BY_VALUE = (scaled_by_another, put_by_another, put_once, put_once_by_storage)
BY_VALUE += (placed_by_what_came, placed_by_the_length_of_what_came)


@pytest.mark.parametrize("puts", BY_VALUE, ids=lambda puts: puts.__name__)
def test_where_a_tensor_goes_may_depend_on_the_value_of_another(puts):
    """It was direct, or put nowhere, as without the value."""
    model = module_of(s=zeros(), a__w=zeros(6, 2))
    values = {"s": torch.tensor(2.0), "a": torch.rand(4, 2)}
    found = check(model, lambda weights: puts(model, dict(weights)), {"s": (), "a": (4, 2)}, values)
    assert set(found.whole) == {"s", "a"}


OTHERWISE = {
    "computes": lambda model, weights: model.a.w.data[:4].copy_(weights["a"] + len(weights)),
    "computes only with others": lambda model, weights: model.a.w.data[:4].copy_(
        weights["a"] + 1 if "b" in weights else weights["a"]
    ),
    "places": lambda model, weights: model.a.w.data[[*weights].index("a") :][:4].copy_(weights["a"] + 1),
    "fills": lambda model, weights: [
        model.a.w.data[:4].copy_(weights["a"] + 1),
        model.a.w.data[4:].fill_(len(weights)),
    ],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_comes_whole_is_loaded_as_with_all_others(name):
    """load_whole() gave its loader `a` alone, with which it does otherwise."""
    model = module_of(a__w=zeros(6, 2), b__w=zeros(4, 2))

    def load(weights):
        weights = dict(weights)
        if "b" in weights:
            model.b.w.data.copy_(weights["b"])
        if "a" in weights:
            OTHERWISE[name](model, weights)

    assert set(check(model, load, dict.fromkeys("ba", (4, 2))).whole) == {"a", "b"}


class Latent(torch.nn.Module):
    """Keeps parts of a weight where no loader writes directly, as SGLang's DeepSeek keeps w_kc."""

    def __init__(self):
        super().__init__()
        self.kv_b, self.other = (torch.nn.Linear(4, 6, bias=False, dtype=TYPE) for _ in range(2))
        self.w_kc, self.caches, self.backend = zeros(4, 3), {"k": zeros(4, 3)}, types.SimpleNamespace(k=zeros(4, 3))
        self.requires_grad_(False)


def half(model):
    return model.kv_b.weight.data[:3].t()


# How a loader derives something from a parameter that it has loaded.
DERIVED = {
    "attribute": lambda m: setattr(m, "w_kc", half(m).contiguous()),
    "scaled attribute": lambda m: setattr(m, "w_kc", (half(m) + 0) * 2),
    "entry": lambda m: m.caches.update(k=half(m).clone()),
    "new entry": lambda m: m.caches.update(v=half(m).clone()),
    "in place": lambda m: m.w_kc.copy_(half(m)),
    "by a buffer": lambda m: m.w_kc.copy_(torch.empty(4, 3).copy_(half(m))),
    "into another object": lambda m: m.backend.k.copy_(half(m)),
    "number": lambda m: setattr(m, "largest", half(m).max().item()),
    "numbers": lambda m: setattr(m, "numbers", half(m).tolist()),
    "by numpy": lambda m: setattr(m, "w_kc", torch.from_numpy(m.kv_b.weight.data.numpy().T[:, :3].copy())),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_a_loader_derives_from_a_parameter_is_derived_again(name):
    model = Latent()

    def load(weights):
        for key, weight in weights:
            getattr(model, key).weight.data.copy_(weight)
        DERIVED[name](model)

    shapes = {"kv_b": (6, 4), "other": (6, 4)}
    load(values_of(shapes).items())  # a server that is up
    values = {key: value + 0.5 for key, value in values_of(shapes).items()}
    found = check(model, load, shapes, values)
    asks = name in ("number", "numbers", "by numpy")  # on which may depend where others go
    assert found.whole["kv_b"] == (ASKS if asks else READ)
    assert ("other" in found.direct) == (not asks), found.whole
    assert same_bits(model.backend.k, half(model).contiguous()) or name != "into another object"


@pytest.mark.parametrize("from_others", [False, True])
def test_a_write_into_memory_that_is_not_the_models_is_done_by_the_loader_alone(from_others):
    """A counter: asking doesn't count."""
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6))
    model.loads = zeros(1)

    def load(weights):
        for name, weight in weights:
            (model.a if name == "a" else model.b.w).data.copy_(weight)
        model.loads.add_(model.loads + 1 if from_others else 1)

    found = check(model, load, dict.fromkeys("ab", (4, 6)))
    assert {*found.whole.values()} == {"its loader writes to memory that isn't the model's"}


def set_flag(model, names, weights):
    model.has_bias = "bias" in names


def add_names(model, names, weights):
    model.seen = [*names]


def count(model, names, weights):
    model.loads = getattr(model, "loads", 0) + 1


def keep_scale(model, names, weights):
    if "norm" in weights:
        model.scale = weights["norm"].abs().amax()


def make_room(model, names, weights):
    model.room = zeros(2)


def log_names(model, names, weights):
    model.log += names


SETS = {set_flag: {"norm"}, add_names: {"norm"}, keep_scale: {"norm"}, count: {"w", "norm", "bias"}}
SETS |= {make_room: SETS[count], log_names: SETS[count]}


@pytest.mark.parametrize("sets", SETS, ids=lambda sets: sets.__name__)
@pytest.mark.parametrize("is_up", [False, True])
def test_attributes_are_as_a_call_with_all_names_leaves_them(sets, is_up):
    """Also where the loader gets only some names, or none; and after asking they are as before."""
    model = module_of(w=zeros(4, 4), bias=zeros(4), n__norm=zeros(4))
    model.log = []

    def load(weights):
        weights = dict(weights)
        for name, weight in weights.items():
            (model.n.norm if name == "norm" else getattr(model, name)).data.copy_(
                weight + 1 if name == "norm" else weight
            )
        sets(model, [*weights], weights)

    shapes = {"w": (4, 4), "norm": (4,), "bias": (4,)}
    if is_up:
        load(values_of(shapes).items())
    found = check(model, load, shapes)
    assert set(found.whole) == SETS[sets]


class Settings(dict):
    """As EasyDict and others: its copy() is a plain dict."""


def test_attributes_are_set_also_where_nothing_comes_whole():
    model = module_of(a=zeros(4, 6))

    def load(weights):
        for _, weight in weights:
            model.a.data.copy_(weight)
        model.is_loaded, model.names, model.settings = True, {"a"}, Settings(order=[1, {2}])

    assert check(model, load, {"a": (4, 6)}).direct
    assert model.is_loaded and model.names == {"a"}
    assert type(model.settings) is Settings and model.settings == {"order": [1, {2}]}


def test_asking_leaves_no_tensor_without_memory_in_another_object():
    model = Latent()
    before, model.backend.table = model.backend.k, {"k": model.w_kc}

    def load(weights):
        for key, weight in weights:
            getattr(model, key).weight.data.copy_(weight)
            model.backend.k, model.backend.table["k"], model.backend.new = (weight * 2,) * 3

    torch_overlay.landings(load, model, metas_of({"kv_b": (6, 4)}))
    assert model.backend.k is before and model.backend.table == {"k": model.w_kc}
    assert not hasattr(model.backend, "new")


def test_asking_a_loader_that_is_refused_leaves_attributes_as_they_were():
    model = module_of(a=zeros(4, 6))

    def load(weights):
        model.begun = True
        raise KeyError("none of these")

    with pytest.raises(ValueError, match="none of these"):
        torch_overlay.landings(load, model, metas_of({"a": (4, 6)}))
    assert not hasattr(model, "begun")


class Own(torch.nn.Parameter):
    """As vLLM's parameters, which are of classes of their own."""


def test_a_loader_that_swaps_tensors_leaves_the_model_as_it_was():
    model = torch.nn.Linear(6, 4, bias=False)
    model.weight = Own(model.weight.detach())
    model.weight.loader, model.weight.grad = "its own", torch.ones(4, 6)
    weight, before = model.weight, model.weight.detach().clone()

    def load(weights):
        for _, tensor in weights:
            torch.utils.swap_tensors(model.weight, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    found = torch_overlay.landings(load, model, metas_of({"w": (4, 6)}))
    assert found.whole == {"w": "its loader keeps it"}
    assert model.weight is weight and type(weight) is Own and weight.loader == "its own" and weight.requires_grad
    assert torch.equal(weight.detach(), before) and torch.equal(weight.grad, torch.ones(4, 6))
    bring(found, values_of({"w": (4, 6)}))
    assert torch.equal(model.weight, values_of({"w": (4, 6)})["w"])


@pytest.mark.parametrize("asks", [False, True])
def test_progress_counts_the_tensors_that_the_loader_takes_and_changes_nothing(asks, monkeypatch, caplog):
    """Also where the loader asks for a value, so that it is asked for each tensor alone, keeps a tensor, or leaves off
    before the last; and where the user's function raises."""
    monkeypatch.setattr("torch_overlay.transfers.stats.SECONDS", 0)
    model, kept = module_of(a=zeros(4, 6), b=zeros(4, 6), c=zeros(4, 6)), []

    def load(weights):
        for name, weight in weights:
            getattr(model, name).data.copy_(weight)
            if name == "b":
                kept[:] = [weight]
                bool(asks and weight.sum() > 0)
            if name == "c":
                break

    metas = metas_of(dict.fromkeys("abcd", (4, 6)))
    told = []
    with_progress = torch_overlay.landings(load, model, metas, progress=lambda *numbers: told.append(numbers))
    without = torch_overlay.landings(load, model, metas)
    assert str(with_progress) == str(without) and "b" in without.whole
    assert told[:3] == [(1, 8), (2, 8), (3, 8)] or asks
    done, sizes = zip(*told)
    assert [*done] == sorted({*done}) and [*sizes] == sorted(sizes) and done[-1] == sizes[-1] >= 8
    assert str(torch_overlay.landings(load, model, metas, progress=lambda done, size: 1 / 0)) == str(without)
    assert caplog.text.count("progress= of landings() raised") == 1


def test_what_comes_whole_and_never_arrived_is_not_loaded():
    """Its memory has no values yet. What came isn't loaded either: the loader may make one weight of several."""
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6))
    load = loader(a=lambda w: model.a.data.copy_(w + 1), b=lambda w: model.b.w.data.copy_(w + 1))
    found = torch_overlay.landings(load, model, metas_of(dict.fromkeys("ab", (4, 6))))
    target = found.target()
    target["a"].fill_(1)
    with pytest.raises(ValueError, match=r"needs all tensors that come whole, and 'b' never arrived.*left_out"):
        found.load_whole()
    assert not model.a.any() and not model.b.w.any()
    found.target()["b"].fill_(2)
    found.load_whole()
    assert (model.a == 2).all() and (model.b.w == 3).all()


@pytest.mark.parametrize("copies", [False, True])
def test_a_loader_may_go_over_the_weights_twice_and_change_them(copies):
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6))

    def load(weights):
        names = [name for name, _ in weights]
        for _, weight in weights:
            weight.mul_(2)
        for name, weight in weights:
            (model.a if name == "a" else model.b.w).data.copy_(weight + len(names) + len(weights))
        assert weights[-1][0] == "b"

    found = torch_overlay.landings(load, model, metas_of(dict.fromkeys("ab", (4, 6))))
    for name, tensor in found.target().items():
        tensor.fill_(1 if name == "a" else 2)
    found.load_whole(copies=copies)
    assert (model.a == 6).all() and (model.b.w == 8).all()
    assert (found.target()["a"] == (1 if copies else 2)).all()


def test_what_no_name_reaches_is_told():
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6), c__w=zeros(2))
    model.register_buffer("kept", zeros(3))
    model.register_buffer("passing", zeros(3), persistent=False)
    put = {"a": lambda w: model.a.data[:3].copy_(w[:3]), "b": lambda w: model.b.w.data.copy_(w * 2)}
    put["expert7"] = lambda w: None
    found = torch_overlay.landings(loader(**put), model, metas_of(dict.fromkeys(put, (4, 6))))
    assert found.untouched == {"a": 6, "c.w": 2, "kept": 3} and found.skipped == ("expert7",)
    assert "1 of 3 tensors (72 bytes) go straight into the model; 1 (96 bytes) come whole; 1 go nowhere" in str(found)


def test_data_says_the_same_to_who_has_only_the_parameters():
    model = module_of(a=zeros(4, 6, dtype=torch.bfloat16), b__w=zeros(6, 4), c__w=torch.full((3,), 7.0))
    put = {
        "a": lambda w: model.a.data[1:3].copy_(w[2:]),
        "b": lambda w: model.b.w.data.t().copy_(w),
        "c": lambda w: [model.c.w.data[:1].copy_(w[0, :1]), model.c.w.data[1:].fill_(5)],
    }
    shapes = dict.fromkeys(put, (4, 6))
    found = torch_overlay.landings(loader(**put), model, metas_of(shapes))
    data = json.loads(json.dumps(found.as_data()))
    values, params = values_of(shapes), dict(model.named_parameters())

    def at(place):
        param = params[place["parameter"]]
        return param.as_strided(place["shape"], place["strides"], param.storage_offset() + place["offset"])

    for name, boxes in data["direct"].items():
        for box in boxes:
            cut = tuple([slice(a, a + n) for a, n in zip(box["start"], box["shape"])])
            at(box).copy_(values[name][cut])
    for fill in data["fills"]:
        at(fill).fill_(fill["value"])
    got = {name: param.clone() for name, param in params.items()}
    for param in params.values():
        param.zero_()
    loader(**put)([*values.items()])
    assert all(torch.equal(got[name], param) for name, param in params.items())
    assert data["tensors"] == {name: ["float32", [4, 6]] for name in put} and data["untouched"] == {"a": 12}


def test_a_transfer_writes_them_and_the_loader_gets_the_rest():
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6), c__w=zeros(4, 6))
    put = {"a": lambda w: model.a.data.copy_(w), "b": lambda w: model.b.w.data.copy_(w * 2), "c": lambda w: None}
    source = {name: torch.randn(4, 6) for name in put}
    found = torch_overlay.landings(loader(**put), model, source)
    with pytest.raises(RuntimeError, match="Nothing came whole yet: give target"):
        found.load_whole()
    at = f"tcp://127.0.0.1:{forks.free_port()}"
    with torch_overlay.meet(at, rank=0, world_size=1) as place:
        with torch_overlay.Transfer(source, found.target(), group=place, strict=False) as sync:
            for _ in range(2):
                source["a"].add_(1)
                source["b"].add_(1)
                sync.run()
                found.load_whole()
                assert torch.equal(model.a, source["a"]) and torch.equal(model.b.w, source["b"] * 2)
            assert sync.left_out == {"source": ("c",), "target": ()}


# --- again, when it no longer holds


def experts(order):
    """Two of four experts lie here, those of `order`."""
    model = module_of(w=zeros(2, 3))

    def load(weights):
        for name, weight in weights:
            for row in [row for row, expert in enumerate(order) if expert == int(name)]:
                model.w.data[row].copy_(weight)

    return model, load, {str(expert): (3,) for expert in range(4)}


@pytest.mark.parametrize("kind", ["list", "tensor", "function", "numpy"])
def test_experts_that_moved_make_landings_stale_and_new_ones_are_right(kind):
    order = torch.tensor([2, 0])
    model, load, shapes = experts(order)
    on = {"list": [0], "tensor": {"map": order}, "function": lambda: order.tolist(), "numpy": order.numpy()}[kind]
    found = torch_overlay.landings(load, model, metas_of(shapes), depends_on=on)
    assert found.stale() is None and set(found.direct) == {"0", "2"} and found.skipped == ("1", "3")
    order.copy_(torch.tensor([3, 3]))  # in place; the second is a replica
    if kind == "list":
        on[0] = 1
    assert found.stale() == "what they depend on has changed"
    found = found.again()
    assert found.stale() is None and set(found.direct) == {"3"} and len(found.direct["3"]) == 2
    check(model, load, shapes)


def test_a_model_whose_memory_changed_makes_landings_stale():
    model = module_of(a=zeros(4, 6), b__w=zeros(4, 6), c__w=zeros(3))
    put = {"a": lambda w: model.a.data.copy_(w), "b": lambda w: model.b.w.data.copy_(w * 2)}
    ask = lambda: torch_overlay.landings(loader(**put), model, metas_of(dict.fromkeys("ab", (4, 6))))
    found = ask()
    model.b.w.data = zeros(4, 6)  # comes whole, by the loader
    model.c.w.data = zeros(3)
    assert found.stale() is None
    model.a.data.add_(1)
    assert found.stale() is None
    model.a.data = zeros(4, 6)
    assert found.stale() == "'a' of the model lies elsewhere"
    found = found.again()
    assert found.stale() is None
    model.c.w.data = zeros(5)
    assert found.stale() == "the model has other tensors: 'c.w'"
    found = found.again()
    model.add_module("d", torch.nn.Linear(1, 1))
    assert "'d.weight', 'd.bias'" in found.stale()


def test_what_landings_refuse():
    model = module_of(a=zeros(4))
    with pytest.raises(TypeError, match=r"needs tensors by name, on meta for example; got 'a', a int"):
        torch_overlay.landings(loader(), model, {"a": 4})
    with pytest.raises(ValueError, match="Two tensors are called 'a'"):
        torch_overlay.landings(loader(), model, [("a", zeros(4)), ("a", zeros(4))])
    said = types.SimpleNamespace(name="a", dtype=TYPE, shape=(4,))  # as vLLM's ParamMeta
    assert torch_overlay.landings(loader(a=lambda w: model.a.data.copy_(w)), model, [said]).direct


# --- loaders at random


class Program:
    """A model and a loader, made from numbers: each tensor is cut, turned, copied, cast or computed with in several
    ways, and goes to views of fused, turned and padded parameters; some places are written by two."""

    def __init__(self, draw):
        self.draw, self.params, self.actions, self.shapes = draw, {}, {}, {}
        self.model = torch.nn.Module()
        for number in range(1 + draw(3)):
            name = f"t{number}"
            shape = tuple([1 + draw(5) for _ in range(draw(4))])
            self.shapes[name] = shape
            self.actions[name] = [self._action(torch.arange(math.prod(shape)).reshape(shape)) for _ in range(draw(4))]
        self.looks, self.derives = not draw(8), [self._derive(number) for number in range(max(0, draw(5) - 2))]

    def _derive(self, number):
        """What the loader leaves in attributes: made of a parameter, of the names, of neither."""
        kind, model, key = self.draw(5), self.model, f"attribute{number}"
        params = [*model.parameters()]
        if kind < 3 and params:
            param = params[self.draw(len(params))]
            model.caches = {**getattr(model, "caches", {}), key: param.detach() * 0}
            return [
                lambda names: setattr(model, key, param.data * 2),
                lambda names: model.caches.update({key: param.data.clone()}),
                lambda names: model.caches[key].copy_(param.data),
            ][kind]
        if kind == 3:
            return lambda names: setattr(model, key, [*names])
        return lambda names: setattr(model, key, "t0" in names)

    def _action(self, value):
        steps = []
        for _ in range(self.draw(5)):
            step = self._step(value)
            if step is not None:
                steps.append(step)
                value = step(value)
        return steps, self._place(tuple(value.shape))

    def _step(self, value):
        kind, dims = self.draw(13), value.ndim
        dim = self.draw(dims) if dims else 0
        if kind < 4 and dims and value.shape[dim]:
            start = self.draw(value.shape[dim])
            length = 1 + self.draw(value.shape[dim] - start)
            return lambda w: w.narrow(dim, start, length)
        if kind == 4 and dims > 1:
            other = self.draw(dims)
            return lambda w: w.transpose(dim, other)
        if kind == 5 and dims:
            at = self.draw(value.shape[dim])
            return lambda w: w.select(dim, at)
        if kind == 6:
            return lambda w: w.unsqueeze(dim)
        if kind == 7:
            return lambda w: w.contiguous()
        if kind == 8:
            return lambda w: w.clone()
        if kind == 9:
            return lambda w: w.reshape(-1)
        if kind == 10:
            return (lambda w: w * 3) if not self.draw(4) else lambda w: w.to(torch.float64)
        if kind == 12:
            return lambda w: w.zero_()
        if kind == 11 and dims:
            return lambda w: w[(slice(None),) * dim + (slice(None, None, 2),)]
        return None

    def _place(self, shape):
        """A view of a parameter with this shape; sometimes of one that is there already."""
        there = [place for place in self.params.values() if place[0] == shape]
        if there and not self.draw(5):
            return there[self.draw(len(there))][1]
        name, dtype = f"p{len(self.params)}", (torch.float32, torch.bfloat16)[self.draw(4) == 0]
        around = [(self.draw(3), self.draw(3)) for _ in shape]
        room = torch.full([a + n + b for n, (a, b) in zip(shape, around)], 7.0, dtype=dtype)
        turned = len(shape) > 1 and self.draw(2)
        module = self.model
        if self.draw(3):  # else beside others in one module
            module = torch.nn.Module()
            self.model.add_module(f"m{len(self.params)}", module)
        module.register_parameter(name, torch.nn.Parameter(room.t() if turned and len(shape) == 2 else room, False))
        param, pads = getattr(module, name), self.draw(3) == 0

        def place(write):
            view = param.data.t() if turned and len(shape) == 2 else param.data
            for dim, (before, _) in enumerate(around):
                view = view.narrow(dim, before, shape[dim])
            write(view)
            if pads and shape and around[0][0]:
                (param.data.t() if turned and len(shape) == 2 else param.data)[: around[0][0]].fill_(2)

        self.params[name] = shape, place
        return place

    def load(self, weights):
        weights = list(weights)
        for name, weight in weights:
            if self.looks:
                try:
                    weight = weight * 2 if weight.sum().item() > 0 else weight
                except Exception:
                    pass
            for steps, place in self.actions[name]:
                value = weight
                for step in steps:
                    value = step(value)
                place(lambda view, value=value: view.copy_(value))
        for derive in self.derives:
            derive([name for name, _ in weights])


class Numbers:
    """Whole numbers below a bound, from one that hypothesis draws."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, bound):
        return int(torch.randint(max(bound, 1), (), generator=self.generator))


SEEN = {"direct": 0, "whole": 0}


@settings(max_examples=6 * settings.default.max_examples)
@given(st.integers(0, 2**32))
def test_random_loaders(seed):
    program = Program(Numbers(seed))
    values = {name: torch.rand(shape) + 0.1 for name, shape in program.shapes.items()}
    found = check(program.model, program.load, program.shapes, values)
    SEEN["direct"] += len(found.direct)
    SEEN["whole"] += len(found.whole)


def test_random_loaders_were_of_both_kinds():
    assert min(SEEN.values()) > 50 or not any(SEEN.values())


def test_a_model_without_a_loader_of_its_own_has_one_in_three_lines():
    """As transformers' models, with tied weights: the head is its embedding."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "norm": torch.nn.LayerNorm(4)}).bfloat16()
    model["head"] = torch.nn.Linear(4, 6, bias=False)
    model["head"].weight = model["embed"].weight
    model.requires_grad_(False)

    def load(weights):
        parameters = dict(model.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)

    found = check(model, load, {name: tuple(param.shape) for name, param in model.named_parameters()})
    assert set(found.direct) == {"embed.weight", "norm.weight", "norm.bias"} and not found.untouched
