"""Redistribution where no gradient is asked for: no node of autograd is made, and nobody can tell by the result."""

import contextlib
import inspect
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as torch_redistribute

from mesh_harness import fake_world

R, S = Replicate(), Shard
MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
CONFIG = {
    "op_dtype": torch.float32,
    "out_dtype": torch.float32,
    "backward_options": dict.fromkeys(("op_dtype", "out_dtype"), torch.float32),
}
TYPES = {"dtype_config": CONFIG}
if "dtype_config" not in inspect.signature(torch_redistribute.Redistribute.forward).parameters:  # before 2.13
    TYPES = {"forward_dtype": torch.float32, "backward_dtype": torch.float32}


@pytest.fixture
def mesh():
    """Rank 3 of a 2 x 4 mesh."""
    with fake_world(3, 8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def nodes(monkeypatch):
    """One entry for each node of autograd that a redistribution makes."""
    forward, made = torch_redistribute.Redistribute.forward, []
    counting = staticmethod(lambda *given: made.append(given) or forward(*given))
    monkeypatch.setattr(torch_redistribute.Redistribute, "forward", counting)
    return made


def placed(mesh, *placements, **options):
    """A DTensor over an 8x4 local tensor."""
    return DTensor.from_local(torch.rand(8, 4, **options), mesh, placements, run_check=False)


@contextlib.contextmanager
def always_a_node(monkeypatch):
    """As torch would do it: by the `apply` that every autograd function has."""
    redistribute = torch_redistribute.Redistribute
    inherited = classmethod(lambda cls, *given: super(redistribute, cls).apply(*given))
    with monkeypatch.context() as patched:
        patched.setattr(redistribute, "apply", inherited, raising=False)
        yield


def moved(source, target):
    """What `seen` says of a redistribution; if torch refuses it, its words: in inference mode before 2.13 it does."""
    try:
        return seen(source, source.redistribute(placements=target))
    except NotImplementedError as refused:
        return str(refused)


def seen(source, result):
    """All that a caller can ask of a result without communicating."""
    local, before = result._local_tensor, source._local_tensor
    return {
        "class": (type(result), type(local)),
        "autograd": (result.requires_grad, result.is_leaf, result.grad_fn is None, result._is_view()),
        "inference": (result.is_inference(), local.is_inference()),
        "local": (local.shape, local.stride(), local.dtype, local.requires_grad),
        "same memory": local.untyped_storage().data_ptr() == before.untyped_storage().data_ptr(),
        "same tensor": (local is before, result is source),
        "spec": result._spec,
        "mesh": id(result.device_mesh),
    }


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_result_is_what_autograd_would_have_given(mesh, monkeypatch, mode, leaf, requires_grad):
    for placements in ((S(0), S(1)), (R, S(1)), (R, R), (S(1), S(0))):
        source = placed(mesh, *placements).requires_grad_(requires_grad)
        source = source if leaf else source * 2
        for target in ((S(0), S(1)), (R, R), (S(-1), R)):
            with mode():
                found = moved(source, target)
                with always_a_node(monkeypatch):
                    assert found == moved(source, target), (placements, target)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_frozen_tensor_stays_frozen(mesh, monkeypatch, mode):
    """Of a parameter, `distribute_tensor` leaves a local tensor that asks for gradients; freezing doesn't reach it."""
    for target in ((R, R), (R, S(0)), (S(1), R), (S(0), R)):
        frozen = distribute_tensor(torch.nn.Parameter(torch.rand(8, 8)), mesh, (S(0), R), src_data_rank=None)
        frozen.requires_grad_(False)
        with mode():
            found = seen(frozen, frozen.redistribute(placements=target))
            with always_a_node(monkeypatch):
                assert found == seen(frozen, frozen.redistribute(placements=target)), target
    assert not frozen.full_tensor().requires_grad


def test_no_warning_that_torch_does_not_give(mesh):
    """What has a parameter's local tensor asks for gradients, and so must, for a moment, the DTensor around it."""
    weight = distribute_tensor(torch.nn.Parameter(torch.rand(8, 8)), mesh, (R, R), src_data_rank=None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in ((R, R), (S(0), R)):
            assert not weight.redistribute(placements=target).requires_grad


def test_a_subclass_runs_its_own_forward(mesh):
    class Loud(torch_redistribute.Redistribute):
        ran = 0

        @staticmethod
        def forward(*given):
            Loud.ran += 1
            return torch_redistribute.Redistribute.forward(*given)

    assert Loud.apply(placed(mesh, S(0), R), mesh, (R, R), False, *TYPES.values()).placements == (R, R)
    assert Loud.ran == 1


def test_a_placement_that_calls_itself_equal_is_still_another(mesh):
    class Marked(Replicate):
        """Equal to Replicate, as a subclass inherits it, whatever its mark."""

        def __init__(self, mark):
            super().__init__()
            self.mark = mark

    with torch.no_grad():
        for wanted in (R, Marked(1), Marked(2), R):
            assert placed(mesh, S(0), R).redistribute(placements=(wanted, R)).placements[0] is wanted


def test_other_derivatives_are_torchs_affair(mesh, nodes):
    """It has no forward one, and no transform of functorch: where it says so, it says so still."""
    source = placed(mesh, S(0), R)
    with forward_ad.dual_level(), torch.no_grad():
        source.redistribute(placements=(R, R))
    assert nodes
    with pytest.raises(RuntimeError, match="functorch"), torch.no_grad():
        torch.func.vmap(lambda row: row + source.redistribute(placements=(R, R)).to_local().sum())(torch.ones(2))
