"""Sizes that a compiler leaves open: the plan of known sizes, no more collectives than stock, guards that hold.

A world of one process whose collectives move nothing; values are held by the compiled case on real ranks."""

import contextlib
import itertools
import random

import pytest
import torch
from hypothesis import settings
from sympy import Integer
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_overlay
from mesh_harness import fake_world, needs_overlay
from torch_overlay.distributed.tensor._planner import cost as planner_cost
from torch_overlay.distributed.tensor._runner import answers
from torch_overlay.distributed.tensor._runner.answers import find_answer
from torch_overlay.distributed.tensor._runner.program import Program
from twins_tensor import without_sizes
from width import NIGHTLY

pytestmark = needs_overlay
WORDS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "P": Partial()}
PAIRS = [
    ("".join(source), "".join(target))
    for source in itertools.product("R01P", repeat=3)
    for target in itertools.product("R01", repeat=3)
    if source != target
]
COUNT = settings.default.max_examples * 4 // 25  # more at night
# Named by who met them: each took a collective more than stock while merging was off for every symbol.
MET = [("RPP", "RRR"), ("R00", "RRR"), ("RPP", "R00"), ("1PP", "RRR")]


def read(words):
    return tuple(WORDS[word] for word in words)


def chosen(count=COUNT):
    return MET + random.Random(12).sample(PAIRS, count)


@pytest.fixture
def mesh():
    with fake_world(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten("bc")
        yield mesh


def placed(mesh, source, shape, dynamic):
    """A DTensor whose sizes are symbols, or not, and what keeps the guards."""
    lengths = list(shape)
    for axis, placement in enumerate(source):
        if placement.is_shard():
            lengths[placement.dim] //= mesh.size(axis)
    local, mode, env = torch.empty(lengths), contextlib.nullcontext(), None
    if dynamic:
        mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        local = mode.from_tensor(local, symbolic_context=context)
    with mode:
        return DTensor.from_local(local, mesh, source, run_check=False), mode, env


def collectives(mesh, source, target, shape, dynamic):
    given, mode, _ = placed(mesh, read(source), shape, dynamic)
    with mode, CommDebugMode() as counted:
        given.redistribute(placements=read(target))
    return counted.get_total_counts()


def stocks(mesh, pairs, shape):
    """What stock takes for each pair, of sizes that it doesn't know."""
    torch_overlay.disable()
    try:
        return {pair: collectives(mesh, *pair, shape, dynamic=True) for pair in pairs}
    finally:
        torch_overlay.enable()


def test_no_more_collectives_than_with_known_sizes_or_on_stock(mesh):
    """Of sizes that are multiples of the mesh's."""
    shape, stock = (16, 32), stocks(mesh, chosen(), (16, 32))
    known, asked = ({pair: collectives(mesh, *pair, shape, dynamic) for pair in stock} for dynamic in (False, True))
    assert len(stock) > 10 and known == asked
    assert not {pair: (asked[pair], stock[pair]) for pair in stock if asked[pair] > stock[pair]}
    assert any(asked[pair] < stock[pair] for pair in stock)


def program(mesh, source, target, shape, dynamic=True):
    given, mode, env = placed(mesh, source, shape, dynamic)
    with mode:
        spec = DTensorSpec(mesh, target, tensor_meta=given._spec.tensor_meta)
        return find_answer(mesh, given._local_tensor, given._spec, spec, False, None), env


@pytest.mark.parametrize(("source", "target"), [("P", "1"), ("R", "1"), ("0", "1")])
def test_sizes_may_have_bounds(source, target):
    """No guard beyond what the cuts ask for: it would be an error for whoever said which sizes there are."""
    with fake_world(3, 8):
        line = init_device_mesh("cpu", (8,))

        def moved(local):
            given = DTensor.from_local(local, line, read(source), run_check=False)
            return given.redistribute(placements=read(target)).to_local() * 2

        graphs = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(moved, backend=graphs, fullgraph=True)
        for batch in (16, 17, 24):
            local = torch.ones(batch, 32)
            torch._dynamo.mark_dynamic(local, 0, min=2, max=64)
            assert fast(local).shape == moved(local).shape
        assert graphs.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("placements", "shapes", "graphs"),
    [
        ("0", [(8, 4), (16, 4), (24, 4), (8, 4), (64, 4), (8, 4)], 2),  # one for 8 rows, and one for all others
        ("0", [(8, 4), (9, 4), (8, 4), (9, 4), (10, 4)], 3),  # rank 3 has one row of 8, and of 9 two, as others have
        ("0", [(9, 8), (9, 16), (9, 24), (9, 32)], 2),  # all ranks see that the other dim changes
    ],
)
def test_code_is_compiled_anew_only_where_it_must_be(placements, shapes, graphs):
    """As often as on stock where all cuts are even, for a dim that isn't cut, and for a size that was met before."""
    torch._dynamo.reset()
    with fake_world(3, 8):
        line, counted = init_device_mesh("cpu", (8,)), CompileCounterWithBackend("aot_eager")
        fast = torch.compile(lambda given: given.redistribute(placements=[Shard(1)]), backend=counted)
        for shape in shapes:
            given = distribute_tensor(torch.ones(shape), line, read(placements), src_data_rank=None)
            assert fast(given).shape == shape
        assert counted.frame_count == graphs
    torch._dynamo.reset()


def test_a_misfit_is_an_error_as_with_known_sizes(mesh):
    """Before anything is sent: the other ranks run the plan."""
    source, target = read("000"), read("001")
    for dynamic in (False, True):
        given, mode, _ = placed(mesh, source, (32, 8), dynamic)
        with mode, CommDebugMode() as counted, pytest.raises(ValueError, match="Nothing was sent"):
            meta = given._spec.tensor_meta
            spec = DTensorSpec(mesh, target, tensor_meta=meta)
            find_answer(mesh, given._local_tensor.narrow(0, 0, 3), given._spec, spec, False, None)
        assert counted.get_total_counts() == 0


def test_how_evenly_other_dims_can_be_cut_makes_no_difference(mesh):
    """The plan of a tensor of which one dim is cut, for any length of the other."""
    pairs = [(source, target) for source, target in chosen() if "1" not in source + target]
    for source, target in pairs + [("PP0", "R0R"), ("P0P", "0RR"), ("PPP", "00R")]:
        ends = read(source), read(target)
        forms = [without_sizes(program(mesh, *ends, (32, n), dynamic=False)[0].steps) for n in (8, 9, 16, 31)]
        uncut = all(not state.orders[1] for step in forms[0] for state in (step.before, step.after))
        assert not uncut or forms.count(forms[0]) == len(forms), (source, target)


def kind(step):
    return type(step), getattr(step, "axes", ())


def test_a_plan_for_few_elements_is_guarded(mesh, monkeypatch):
    """Where the cost model prefers another plan for more elements, the guard says up to where this one holds."""
    torch_overlay.prepare(mesh)
    monkeypatch.setattr(planner_cost, "_ASSUMED", {"cpu": planner_cost.Cost(latency=1e-3, bandwidth=1e9)})
    asked = []
    monkeypatch.setattr(answers, "guard_or_false", lambda condition: asked.append(condition) or True)
    differ = 0
    for source, target in chosen(2 * COUNT):
        ends = read(source), read(target)
        few, many = (program(mesh, *ends, (n, n), dynamic=False)[0].steps for n in (8, 4096))
        changes = [*map(kind, few)] != [*map(kind, many)]
        asked.clear()
        found = program(mesh, *ends, (16, 16))[0]
        if not answers._only_reduces(*(DTensorSpec(mesh, end) for end in ends)):
            assert isinstance(found, Program) and bool(asked) >= changes, (source, target)
            differ += changes
    assert differ


SIZED = [("R01", "0RR", 1798), ("000", "111", 1800), ("P0R", "R10", 904)]


@pytest.mark.parametrize(("source", "target", "n"), SIZED if NIGHTLY else SIZED[2:])
def test_every_size_that_the_guards_admit_has_the_traced_plan(mesh, source, target, n):
    """With rounds, or where a plan is shared by about equal sizes: a rank that traced another size runs the same."""
    ends = read(source), read(target)
    found, env = program(mesh, *ends, (4096, n))
    assert isinstance(found, Program), found
    hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    cut = 2 ** source.count("1")
    form, admitted = without_sizes(found.steps), []
    guards = dict.fromkeys(guard.expr for guard in env.guards)  # in order: an earlier one keeps a divisor from being 0
    for size in range(cut, 2100, cut):
        values = {
            symbol: Integer(size // cut if int(hint) == n // cut else int(hint)) for symbol, hint in hints.items()
        }
        if all(guard.xreplace(values) for guard in guards):
            admitted.append(size)
            known, _ = program(mesh, *ends, (4096, size), dynamic=False)
            assert without_sizes(known.steps) == form, size
    assert n in admitted and len(admitted) > 50
