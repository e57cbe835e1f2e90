"""What a `Transfer` says of arguments and tensors that it can't take: what was needed, what came, what to do."""

import json
import os
import struct
from datetime import timedelta

import pytest
import torch

import forks
import torch_overlay
from way import needs_package

pytestmark = needs_package


@pytest.fixture(scope="module")
def place():
    """Of this process alone."""
    with torch_overlay.meet(f"tcp://127.0.0.1:{forks.free_port()}", rank=0, world_size=1) as alone:
        yield alone


def ones(*shape):
    return torch.ones(*shape)


def freed(*shape):
    tensor = torch.ones(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_class(name):
    """A tensor of a class of torch's that takes a world to make, by its name."""
    return torch.ones(4).as_subclass(type(name, (torch.Tensor,), {}))


SEVERAL = {"embed.weight": ("embed.weight", "head.weight")}
TARGETS = {"embed.weight": ones(3), "head.weight": ones(3)}


@pytest.mark.parametrize(
    ("source", "target", "how", "words"),
    [
        ({"w": ones(2)}, {"w": ones(2)}, {"timeout": "20s"}, "seconds above 0, or a timedelta; got '20s'"),
        ({"w": ones(2)}, {"w": ones(2)}, {"timeout": float("inf")}, "seconds above 0, or a timedelta; got inf"),
        ({"w": ones(2)}, {"w": ones(2)}, {"timeout": timedelta(0)}, "or a timedelta; got datetime.timedelta.0."),
        ({"w": ones(2)}, {"w": ones(2)}, {"budget": "1GB"}, "budget= takes a whole number of bytes; got '1GB'"),
        ({"w": ones(2)}, {"w": ones(2)}, {"budget": float("inf")}, "budget= takes a whole number of bytes; got inf"),
        ({"w": ones(2)}, {"w": ones(2)}, {"names": ["w"]}, r"names= takes a dict .* or a function; got \['w'\]"),
        (None, None, {}, "needs a source and a target, and got None for both on rank 0, which are all that make it"),
        ({"w": of_class("FlatParameter")}, {"w": ones(4)}, {}, "is a FlatParameter, .* use its sharded state dict"),
        (
            {"w": of_class("ShardedTensor")},
            {"w": ones(4)},
            {},
            "is a ShardedTensor, .* give FSDP a device_mesh, and use",
        ),
        (
            {"embed.weight": ones(2, 2).to_sparse()},
            TARGETS,
            {"names": SEVERAL},
            r"source 'embed.weight' is sparse_coo, and",
        ),
        (
            {"tok": ones(2, 2).to_sparse()},
            TARGETS,
            {"names": {"tok": ("embed.weight", "head.weight")}},
            r"source 'embed.weight' \(given as 'tok'\) is sparse_coo, and a transfer moves dense",
        ),
    ],
)
def test_what_cannot_be_made(place, source, target, how, words):
    with pytest.raises((ValueError, TypeError), match=words):
        torch_overlay.Transfer(source, target, group=place, **how)


@pytest.mark.parametrize(
    ("source", "target", "how", "words"),
    [
        (freed(6, 4), {"embed.weight": ones(6, 4)}, {}, r"source 'embed.weight' needs 96 bytes of storage, and has 0"),
        (
            freed(3),
            TARGETS,
            {"names": SEVERAL},
            r"'embed.weight' needs .*; the source 'head.weight' \(given as 'embed.weight'\) needs 12 bytes",
        ),
    ],
)
def test_a_source_without_memory(place, source, target, how, words):
    """It may come back before a run, as one that is offloaded does."""
    with torch_overlay.Transfer({"embed.weight": source}, target, group=place, **how) as sync:
        with pytest.raises(ValueError, match=words):
            sync.run()
        source.untyped_storage().resize_(4 * source.numel())
        source.fill_(7)
        sync.run()
        assert all(bool((each == 7).all()) for each in target.values())


def written_checkpoint(folder):
    """With one number, 3, called w."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 3))
    return torch_overlay.checkpoint(folder)


def test_names_are_asked_for_paths_of_tensors_alone(place, tmp_path):
    """A table raises for others: a rank without a source, and a checkpoint, had the path ''."""
    names, target = {"w": "served"}.__getitem__, torch.zeros(1)
    for source in ({"w": torch.full((1,), 3.0), "nothing": None}, written_checkpoint(tmp_path)):
        target.zero_()
        with torch_overlay.Transfer(source, {"served": target}, group=place, names=names) as sync:
            sync.run()
        assert target == 3
        with (
            torch_overlay.meet(f"tcp://127.0.0.1:{forks.free_port()}", rank=0, world_size=1, open=True) as trainers,
            torch_overlay.Transfer(source, None, group=trainers, names=names) as sync,
        ):
            sync.run(async_op=True, snapshot=True).wait()


@pytest.mark.parametrize(
    ("why", "said"), [(ValueError("no step"), "no step"), (KeyError(), "it refused"), ("", "it re")]
)
def test_a_refusal_by_an_error(place, why, said):
    """It ended the Transfer on all ranks: JSON, by which they hear why, takes no errors."""
    with torch_overlay.Transfer({"w": ones(2)}, {"w": ones(2)}, group=place) as sync:
        assert f"nothing was sent: rank 0: {said}" in sync.refuse(why)
        sync.run()


def test_who_cannot_join_leaves_the_place_open():
    """It said there that the place was closed, and no server came in any more."""
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with torch_overlay.meet(address, rank=0, world_size=1, open=True):
        with pytest.raises(RuntimeError, match=r"rank 1 of the server 'two' didn't come within 0.5 s"):
            torch_overlay.join(address, name="two", world_size=2, timeout=0.5)
        torch_overlay.join(address, name="one", timeout=5).close()


def test_a_closed_place_that_something_keeps():
    """join() waited there without a limit."""
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with torch_overlay.meet(address, rank=0, world_size=1, open=True) as trainers:
        trainers._store.set("closed", "")
        with pytest.raises(RuntimeError, match=r"the place there is closed, and no other opened within 0.5 s"):
            torch_overlay.join(address, timeout=0.5)


def test_trainers_wait_for_the_servers_that_they_need():
    """Only a run says that there are too few. Of one that couldn't be made nobody could free the place."""
    address = f"tcp://127.0.0.1:{forks.free_port()}"
    with (
        torch_overlay.meet(address, rank=0, world_size=1, open=True) as trainers,
        torch_overlay.Transfer({"w": ones(2)}, None, group=trainers, at_least=1) as sync,
        pytest.raises(RuntimeError, match="at_least=1 has these servers left: none"),
    ):
        sync.run()


@pytest.mark.parametrize(("rank", "size"), [(0.0, 1), ("0", 1), (0, "1"), (1, 1), (-1, 1)])
def test_a_rank_is_a_whole_number(rank, size):
    """Rank 0.0 waited for rank 0 until the timeout."""
    with pytest.raises(ValueError, match="needs whole numbers, a rank from 0 to world_size - 1; got"):
        torch_overlay.meet("tcp://127.0.0.1:1", rank=rank, world_size=size, timeout=1)


def test_truths_of_numpy(place):
    """As a comparison of arrays gives them: JSON, by which ranks compare options, doesn't take them."""
    numpy = pytest.importorskip("numpy")
    truths = dict.fromkeys(("strict", "keep", "changes", "relay"), numpy.bool_(True))
    target = ones(2) * 0
    with torch_overlay.Transfer({"w": ones(2)}, {"w": target}, group=place, **truths) as sync:
        sync.run()
    assert bool((target == 1).all())


def test_a_name_that_utf_8_does_not_have(place):
    name, target = "\ud800", ones(2) * 0
    with torch_overlay.Transfer({name: ones(2)}, {name: target}, group=place) as sync:
        sync.run(only=[name])
    assert bool((target == 1).all())


def test_a_fork_leaves_its_parents_transfer_alone(place, monkeypatch):
    """gloo ended the parent, whose messages the fork had read; and its close told other ranks that the parent left."""
    with torch_overlay.Transfer({"w": ones(2)}, {"w": ones(2)}, group=place) as sync:
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 0)
            for call in (sync.run, sync.verify, sync.forget, sync.close):
                with pytest.raises(RuntimeError, match="belongs to the process that made it: a fork has"):
                    call()
        sync.run()


@pytest.mark.parametrize("timeout", ["20s", 0, float("nan"), None])
def test_a_timeout_of_meet(timeout):
    with pytest.raises(ValueError, match="timeout= takes a number of seconds above 0"):
        torch_overlay.meet("tcp://127.0.0.1:1", rank=0, world_size=1, timeout=timeout)


@pytest.mark.parametrize(("shape", "start"), [((7, 4), (2.5, 0)), ((7, 4), (2.0, 0)), ((7.0, 4), (2, 0)), ((7, 4), 2)])
def test_a_piece_lies_at_whole_numbers(shape, start):
    with pytest.raises(TypeError, match=r"a shape and a start of whole numbers, one for each dim; got shape \(7"):
        torch_overlay.piece(ones(2, 4), shape, start)


def test_a_piece_shows_its_tensor():
    part = ones(2, 4)
    assert torch_overlay.piece(part, (7, 4), (2, 0)).local is part


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 2), (1, 1), True),
        ((4, 3), (2, 1), True),
        ((3, 2), (2, 3), False),
        ((2, 3), (1, 2), False),
        ((1, 5), (0, 1), False),
    ],
)
def test_a_target_that_overlaps_itself(place, shape, strides, overlaps):
    memory = torch.zeros(64)
    target = {"w": memory.as_strided(shape, strides)}
    source = {"w": torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)}
    with torch_overlay.Transfer(source, target, group=place) as sync:
        if overlaps:
            with pytest.raises(
                ValueError, match=r"the target 'w' overlaps itself, .*: several elements share one place"
            ):
                sync.run()
            assert not memory.any()
        else:
            sync.run()
            assert torch.equal(target["w"], source["w"])


def test_a_pointer_of_git_lfs(place, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match=r"model.safetensors is no .* it is a pointer of Git LFS .* `git lfs pull`"):
        torch_overlay.Transfer(torch_overlay.checkpoint(tmp_path), {"w": ones(2)}, group=place)
    target = {"w": ones(1)}
    with torch_overlay.Transfer(written_checkpoint(tmp_path), target, group=place) as sync:
        sync.run()
    assert target["w"].item() == 3


@pytest.mark.parametrize("changes", [False, True])
def test_a_budget_without_room_for_copies_names_no_negative_bytes(place, changes):
    base = torch.arange(80000.0)
    one, other = base[:40000], base[40000:]
    with pytest.raises(
        ValueError, match=r"copies 320000 bytes before it writes; the budget of 5000 bytes has no room"
    ) as said:
        torch_overlay.Transfer(
            {"a": one, "b": other}, {"a": other, "b": one}, group=place, budget=5000, changes=changes
        )
    assert "-" not in str(said.value) and str(said.value).endswith(" Give at least 320000 bytes.")
    made = torch_overlay.Transfer(
        {"a": one, "b": other}, {"a": other, "b": one}, group=place, budget=320000, changes=changes
    )
    made.close()


def test_an_error_of_a_run_says_its_version(place):
    weight = torch.nn.Parameter(ones(4))
    with torch_overlay.Transfer({"w": weight}, {"w": torch.zeros(4)}, group=place) as sync:
        sync.run(version=6)
        weight.data = ones(5)
        with pytest.raises(ValueError, match=r"^A Transfer over rank 0, version 7, can't run, and nothing was sent: "):
            sync.run(version=7)
        with pytest.raises(ValueError, match=r"^A Transfer over rank 0 can't run, and nothing was sent: "):
            sync.run()


def test_a_tie_that_drifted(place):
    tied = torch.zeros(4)
    with pytest.raises(ValueError, match="different values: leave one of them out, or tie them at the source, too"):
        torch_overlay.Transfer({"a": ones(4), "b": torch.zeros(4)}, {"a": tied, "b": tied}, group=place)


def test_bytes_are_printed_alike(place):
    source, target = {"w": ones(37_657)}, {"w": torch.zeros(37_657)}
    with torch_overlay.Transfer(source, target, group=place, budget=150_628) as sync:
        assert "budget 147.1 KiB" in str(sync)
        assert "1 tensor, 147.1 KiB, on rank 0" in str(torch_overlay.explain(sync))


def test_progress_ends_where_nothing_is_sent(place):
    seen = []
    source, target = {"w": ones(3)}, {"w": torch.zeros(3)}
    with torch_overlay.Transfer(source, target, group=place, progress=lambda *both: seen.append(both)) as sync:
        sync.run()
        sync.run()
    assert seen == [(0, 0), (0, 0)]
