# Owner(s): ["oncall: distributed"]
"""Programs that are found again, and what runs step by step."""

import copy
from typing import ClassVar

import torch
from test_exchange import FakeWorld
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.common_utils import run_tests

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.sizes import step_on_shape
from torch_overlay.distributed.tensor._planner.steps import AllGather
from torch_overlay.distributed.tensor._runner import answers
from torch_overlay.distributed.tensor._runner.answers import Answer, Fallback, find_answer
from torch_overlay.distributed.tensor._runner.program import logger
from torch_overlay.distributed.tensor._runner.question import Question
from torch_overlay.distributed.tensor._runner.specs import pads_step_by_step

PLANNED = {"plan_redistribution": True}
WITH_GROUPS = {**PLANNED, "mesh_share_groups": "names", "mesh_joint_groups": "whole"}


class TestAnswers(FakeWorld):
    """On a 2 x 2 mesh."""

    settings = PLANNED

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def _ask(self, mesh: DeviceMesh, length: int = 2, source=(Shard(0), Shard(0))) -> Answer:
        meta = TensorMeta(torch.Size((8, 8)), (8, 1), torch.float32)
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in (source, (Replicate(), Replicate()))]
        return find_answer(mesh, torch.ones(length, 8), *specs, False, None)

    def test_a_question_is_planned_once(self) -> None:
        rows = self._ask(self.mesh)
        self.assertIs(rows, self._ask(copy.copy(self.mesh)))
        replicated = self._ask(self.mesh, 4, (Shard(0), Replicate()))
        self.assertIsNot(replicated, rows)
        self.assertIs(self._ask(self.mesh), rows)

    def test_what_is_not_planned_says_why(self) -> None:
        class Other(Partial):
            pass

        answer = self._ask(self.mesh, 8, (Other("sum"), Replicate()))
        self.assertEqual(answer, Fallback("a placement of the class Other"))

    def test_a_fallback_is_logged_with_its_reason(self) -> None:
        class Other(Partial):
            pass

        given = DTensor.from_local(torch.ones(8, 8), self.mesh, (Other("sum"), Replicate()), run_check=False)
        with self.assertLogs(logger, "DEBUG") as logs:
            given.redistribute(placements=(Replicate(), Replicate()))
        (line,) = [record.getMessage() for record in logs.records if "step by step" in record.getMessage()]
        self.assertRegex(line, r"^\(8, 8\) .* -> .*: step by step: a placement of the class Other$")


class TestShapes(FakeWorld):
    """On a mesh of 4."""

    settings = PLANNED

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (4,))

    def _ask(self, rows: int, local: torch.Tensor, target=Replicate()) -> Answer:
        meta = TensorMeta(torch.Size((rows, 8)), (8, 1), torch.float32)
        specs = [DTensorSpec(self.mesh, (end,), tensor_meta=meta) for end in (Shard(0), target)]
        return find_answer(self.mesh, local, *specs, False, None)

    def test_another_shape_than_the_spec_says_is_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, r"shape \(2, 8\) is expected at \(0,\).*Nothing was sent"):
            self._ask(8, torch.ones(3, 8))

    def test_what_the_others_pad_is_none(self) -> None:
        expected = Fallback("a local tensor of another shape than its spec says")
        self.assertEqual(self._ask(7, torch.ones(1, 8)), expected)
        with self.assertRaisesRegex(ValueError, "Nothing was sent"):
            self._ask(7, torch.ones(3, 8))

    def test_where_nothing_is_sent_it_is_none(self) -> None:
        expected = Fallback("a local tensor of another shape than its spec says")
        self.assertEqual(self._ask(8, torch.ones(3, 8), Shard(0)), expected)

    def test_uneven_shards_are_padded_step_by_step(self) -> None:
        ends = (Shard(0),), (Replicate(),)
        asked = Question(None, *ends, (Shard, Replicate), (), (), (7, 4), torch.float32)
        for length, shape, padded in ((7, (2, 4), True), (7, (4, 4), False), (7, (2, 5), False), (6, (1, 4), False)):
            rows, replicas = (Regions.of((dim,), (None,), (length, 4), (3,)) for dim in (0, None))
            step, held = AllGather(rows, replicas, (0,)), rows.box((0,)).length
            self.assertEqual(pads_step_by_step([step], asked, held, shape), padded, msg=f"{length}, {shape}")
            as_bytes = asked._replace(dtype=torch.int16)
            self.assertFalse(pads_step_by_step([step], as_bytes, held, shape), msg="the others send bytes")


def without_sizes(steps):
    """The steps without the sizes of the tensor."""
    return tuple([step_on_shape(step, ()) for step in steps])


ALL_OPEN = [DimDynamic.DYNAMIC] * 2


def answer_for(mesh, source, target, shape, dynamic):
    """What is found for a local tensor of this shape, the guards on its sizes, and those that are symbols."""
    context = StatelessSymbolicContext(dynamic_sizes=dynamic) if dynamic else None
    env = ShapeEnv() if dynamic else None
    mode = FakeTensorMode(shape_env=env)
    local = mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=context)
    symbols = [size.node.expr for size in local.shape if isinstance(size, torch.SymInt)]
    with mode:
        given = DTensor.from_local(local, mesh, source, run_check=False)
        spec = DTensorSpec(mesh, target, tensor_meta=given._spec.tensor_meta)
        answer = find_answer(mesh, local, given._spec, spec, False, None)
    return answer, env.guards if dynamic else [], symbols


class TestOpenSizes(FakeWorld):
    """On a mesh of 4."""

    settings = PLANNED

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (4,))

    def test_the_plan_is_that_of_known_sizes(self) -> None:
        for source, target in ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Partial(), Shard(1))):
            open_sizes, guards, _ = answer_for(self.mesh, [source], (target,), (8, 16), ALL_OPEN)
            known, _, _ = answer_for(self.mesh, [source], (target,), (8, 16), None)
            self.assertEqual(without_sizes(open_sizes.steps), without_sizes(known.steps), msg=f"{source} to {target}")
            self.assertEqual(open_sizes.text, known.text, msg="of the traced sizes")
            divided = any("Mod" in str(guard.expr) for guard in guards)
            self.assertEqual(divided, target == Shard(1), msg="what is gathered was cut evenly")

    def test_beside_shards_in_another_order_it_depends_on_the_size(self) -> None:
        """These are planned where they are even, and only there."""
        mesh = init_device_mesh("cpu", (2, 1, 2))
        for shards, alone in (((Shard(0), Shard(0)), True), ((_StridedShard(0, split_factor=1), Shard(0)), False)):
            ends = [DTensorSpec(mesh, (*shards, last)) for last in (Partial(), Replicate())]
            self.assertEqual(answers._only_reduces(*ends), alone, msg=f"{shards}")

    def test_what_only_reduces_is_one_plan_for_all_sizes(self) -> None:
        one, guards, _ = answer_for(self.mesh, [Partial()], (Replicate(),), (8, 16), ALL_OPEN)
        other, _, _ = answer_for(self.mesh, [Partial()], (Replicate(),), (5, 3), ALL_OPEN)
        self.assertIs(one, other)
        self.assertEqual(guards, [])


ROWS_OPEN = [DimDynamic.DYNAMIC, DimDynamic.STATIC]


def admitted(case, source, target, shape, lengths):
    """Of these lengths of dim 1, those that the guards for a local tensor of this shape admit; they have its plan."""
    traced, guards, symbols = answer_for(case.mesh, source, target, shape, ALL_OPEN)
    alike = []
    for length in lengths:
        known, _, _ = answer_for(case.mesh, source, target, (shape[0], length), None)
        values = dict(zip(symbols, (shape[0], length)))
        if all(bool(guard.expr.subs(values)) for guard in guards):
            alike.append(length)
            case.assertEqual(without_sizes(known.steps), without_sizes(traced.steps), msg=f"{length}")
    return alike


def check_rows(case, ends, shape, rows) -> None:
    """Where only the number of rows is open, the fewest of these have another plan, which the guards see."""
    traced, guards, (symbol,) = answer_for(case.mesh, *ends, shape, ROWS_OPEN)
    for count in rows:
        known, _, _ = answer_for(case.mesh, *ends, (count, shape[1]), None)
        same = without_sizes(known.steps) == without_sizes(traced.steps)
        case.assertEqual(same, count != rows[0], msg=f"{ends}, {count}")
        case.assertEqual(all(bool(guard.expr.subs({symbol: count})) for guard in guards), same)


class TestSizeGuards(FakeWorld):
    """On a 2 x 2 x 2 mesh that is flattened."""

    ranks = 8
    settings: ClassVar[dict[str, object]] = {**PLANNED, "mesh_share_groups": "names"}

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        self.mesh._flatten("abc")

    def test_more_elements_have_rounds(self) -> None:
        source, target = (Replicate(), Shard(1), Shard(1)), (Shard(1), Replicate(), Replicate())
        lengths = (4, 16, 256, 512, 1024)  # of dim 1 on each rank; the tensor has four times as many
        known = [answer_for(self.mesh, source, target, (4096, length), None)[0] for length in lengths]
        plans = {length: without_sizes(program.steps) for length, program in zip(lengths, known)}
        for length, same in ((16, [4, 16, 256]), (1024, [1024])):
            self.assertEqual(admitted(self, source, target, (4096, length), lengths), same)
            self.assertEqual([other for other in lengths if plans[other] == plans[length]], same)

    def test_few_rows_have_another_plan(self) -> None:
        """Fewer than the mesh has ranks, where only the number of rows is open: a small batch."""
        self.mesh["b", "c"]._flatten("bc")
        ends = (Replicate(), Shard(1), Shard(1)), (Shard(1), Shard(1), Shard(1))
        check_rows(self, ends, (64, 9136), (2, 64))

    def test_shards_that_become_terms_have_their_plan_up_to_a_bound(self) -> None:
        """It changes with more elements, and changes back, which isn't seen from here."""
        ends = (Shard(0), Partial(), Shard(0)), (Partial(), Shard(0), Partial())
        lengths = (1680, 3360, 16384, 65536)
        plans = [without_sizes(answer_for(self.mesh, *ends, (18, length), None)[0].steps) for length in lengths]
        self.assertEqual([plan == plans[0] for plan in plans], [True, True, False, True])
        self.assertEqual(admitted(self, *ends, (18, 1680), lengths), [1680, 3360])


class TestLeastSizes(FakeWorld):
    """On a 2 x 3 x 2 mesh with every group."""

    ranks = 12
    settings = WITH_GROUPS

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("a", "b", "c"))
        for names in (("a", "b"), ("a", "c"), ("b", "c")):
            self.mesh[names]._flatten("".join(names))

    def test_few_rows_have_another_plan(self) -> None:
        """Two rows, so the number of elements is guarded on, not that 12 divides the rows: beside 4101 columns that no
        plan could share; and where rows are counted in units of 12 beside 10 that remain."""
        for ends, shape, rows in (
            (((Replicate(), Shard(1), Shard(1)), (Shard(1), Replicate(), Shard(0))), (90, 4101), (2, 84, 90, 96)),
            (((Shard(1), Shard(1), Replicate()), (Shard(0), Shard(1), Shard(1))), (130, 14460), (2, 14, 130)),
        ):
            check_rows(self, ends, shape, rows)


class TestNoKinds(FakeWorld):
    """On a 2 x 2 mesh with its group."""

    settings = WITH_GROUPS

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def test_one_plan_for_all_sizes_asks_for_no_guard(self) -> None:
        for shape in ((3, 3), (5, 3), (4, 4)):
            _, guards, _ = answer_for(self.mesh, (Shard(0), Shard(1)), (Replicate(),) * 2, shape, ALL_OPEN)
            self.assertEqual([guard.expr for guard in guards], [], msg=f"{shape}")

    def test_rounds_ask_for_no_guard_on_multiples(self) -> None:
        """More elements take more rounds, rounded or not; 4 divides 8 columns, not 10."""
        self.assertEqual(admitted(self, (Shard(0),) * 2, (Shard(1), Shard(0)), (8, 8), (8, 10)), [8, 10])


class TestStableHash(FakeWorld):
    def _hash(self, mesh: DeviceMesh) -> str:
        meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        return DTensorSpec(mesh, (Replicate(), Replicate()), tensor_meta=meta)._stable_hash()

    def test_groups_and_settings_count(self) -> None:
        joint = {"mesh_share_groups": "names", "mesh_joint_groups": "existing"}
        with config.patch(plan_redistribution=True, **joint):
            mesh, equal = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) for _ in range(2))
            first, again = self._hash(mesh), self._hash(copy.copy(mesh))
            self.assertEqual(first, again)
            self.assertNotEqual(
                first, self._hash(equal), "it has other groups, and compiled code has their names in it"
            )
            mesh._flatten("ab")
            flattened = self._hash(mesh)
        self.assertNotEqual(first, flattened)
        with config.patch(plan_redistribution=True, **{**joint, "mesh_joint_groups": "whole"}):
            self.assertNotEqual(self._hash(mesh), flattened)


if __name__ == "__main__":
    run_tests()
