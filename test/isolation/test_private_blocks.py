"""Which code is inside of a block of `private_groups`: never is a mesh taken for private, or for shared, in silence."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import threading
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import torch_overlay
from mesh_harness import fake_world
from way import needs_package, overlay

pytestmark = needs_package
SAYS = "isn't private, though private_groups.* is open in thread .* a block doesn't reach into other threads"


@pytest.fixture(autouse=True)
def world():
    with overlay(), fake_world(1, 4):
        yield


def is_private() -> bool:
    """Whether a mesh made here and now is; one of the whole world shares the default group, if it isn't."""
    import torch.distributed as dist

    return init_device_mesh("cpu", (4,)).get_group() is not dist.group.WORLD


def in_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def in_loop(work):
    """In an executor of asyncio's, which takes no context along."""

    async def run():
        return await asyncio.get_running_loop().run_in_executor(None, work)

    return asyncio.run(run())


@pytest.fixture
def pool():
    """One whose thread runs already."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


THREADS = [in_thread, in_loop]


@pytest.mark.parametrize("through", [*THREADS, "pool"])
def test_a_thread_that_isnt_inside_is_told(through, pool):
    through = (lambda work: pool.submit(work).result()) if through == "pool" else through
    with torch_overlay.private_groups():
        with pytest.warns(UserWarning, match=SAYS) as told:
            assert not through(is_private)
        assert "pool.submit(private_groups()(build))" in str(told[0].message)
        assert "open in thread MainThread" in str(told[0].message)
        assert is_private()
    assert not through(is_private) and not is_private()


@pytest.mark.parametrize("through", [*THREADS, "pool"])
def test_as_a_decorator_it_goes_into_any_thread(through, pool):
    through = (lambda work: pool.submit(work).result()) if through == "pool" else through
    private = torch_overlay.private_groups()(is_private)
    for block in (contextlib.nullcontext, torch_overlay.private_groups):
        with block(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert through(private)
    assert not through(is_private) and not is_private()


def test_the_context_may_be_handed_over(pool):
    with torch_overlay.private_groups(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.submit(contextvars.copy_context().run, is_private).result()
    assert not pool.submit(is_private).result()


def test_tasks_of_the_block_are_inside_and_others_arent():
    """One thread runs both; what was started inside stays so, also after the block."""

    async def started(inside: asyncio.Event) -> list[bool]:
        answers = [is_private(), await asyncio.to_thread(is_private)]
        await inside.wait()
        return [*answers, is_private()]

    async def run():
        after, opened = asyncio.Event(), asyncio.Event()

        async def beside():
            await opened.wait()
            with pytest.warns(UserWarning, match=SAYS):
                return is_private()

        other = asyncio.create_task(beside())
        with torch_overlay.private_groups():
            opened.set()
            task = asyncio.create_task(started(after))
            assert await other is False
        after.set()
        return await task

    assert asyncio.run(run()) == [True, True, True]


def test_a_block_that_fails_is_closed():
    with pytest.raises(KeyError), torch_overlay.private_groups():
        raise KeyError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_private() and not in_thread(is_private)


def test_new_axes_of_a_shared_mesh_are_told_of_as_well_and_views_of_a_private_one_are_private():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("w",))
    with torch_overlay.private_groups():
        own = init_device_mesh("cpu", (4,), mesh_dim_names=("w",))
        with pytest.warns(UserWarning, match=SAYS):
            in_thread(lambda: mesh.unflatten(0, (2, 2), ("a", "b")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert in_thread(lambda: own.unflatten(0, (2, 2), ("a", "b"))) != own
            assert in_thread(lambda: mesh["w"].get_group()) is mesh.get_group()  # makes no group


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave", "build"])), max_size=16))
def test_threads_in_and_out_of_blocks_in_any_order(steps):
    """A mesh is private where its own thread is inside; where only others are, and there alone, it is told."""
    pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(3)]
    blocks = [[] for _ in pools]  # of each thread

    def build():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return is_private(), bool(told)

    def leave(number):
        pools[number].submit(blocks[number].pop().__exit__, None, None, None).result()

    try:
        for number, step in itertools.chain(steps, ((number, "build") for number in range(3))):
            if step == "enter":
                blocks[number].append(torch_overlay.private_groups())
                pools[number].submit(blocks[number][-1].__enter__).result()
            elif step == "leave" and blocks[number]:
                leave(number)
            elif step == "build":
                inside = bool(blocks[number])
                assert pools[number].submit(build).result() == (inside, not inside and any(blocks))
    finally:
        for number, opened in enumerate(blocks):
            while opened:
                leave(number)
        for pool in pools:
            pool.shutdown()
