"""The clients: every script is one, a missing library is a skip, differences are seen, and the page says the record."""

import ast
import importlib.util
import json
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import run_clients  # noqa: E402
from clients import compare, launch, page  # noqa: E402
from clients.catalogue import CLIENTS, EARLIER, OF_THEIR_TIME, SCRIPTS, Client, Missing  # noqa: E402

BY_IMPORT = {"nemo_automodel": "nemo-automodel", "megatron_fsdp": "megatron-fsdp"}


@pytest.mark.parametrize("client", dict.fromkeys((*CLIENTS, *OF_THEIR_TIME)), ids=lambda client: client.name)
def test_script_needs_what_the_catalogue_says(client):
    """Its third-party imports are torch, our recorder and packages that the catalogue names; nothing turns us on."""
    tree = ast.parse(client.script.read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    tops = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"torch", "clients"}
    assert {BY_IMPORT.get(top, top) for top in tops} <= {*client.needs}
    assert ast.get_docstring(tree)


def test_every_script_is_in_the_catalogue():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {client.name for client in CLIENTS}
    assert {*EARLIER.glob("*.py")} == {client.script for client in OF_THEIR_TIME} - {
        client.script for client in CLIENTS
    }


def test_scripts_of_torch_alone_can_be_imported():
    for client in CLIENTS:
        if not client.needs:
            spec = importlib.util.spec_from_file_location(client.name, client.script)
            spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
            assert callable(module.main)


def test_a_missing_library_is_a_skip_that_says_which():
    absent = Client("torch_muon", "a client", ("no-such-package", "torch", "nor-this"))
    with pytest.raises(Missing, match="no-such-package and nor-this not installed"):
        absent.versions()
    entry = run_clients.measured(absent, rounds=0, timeout=1)
    assert entry["skipped"] == "no-such-package and nor-this not installed here"
    assert "Not run: no-such-package and nor-this not installed here." in page.full({"clients": {"x": entry}})


# --- the page


def test_page_says_what_the_record_says():
    for text in [path.read_text() for path in page.PAGES]:
        assert page.filled(text, page.read(page.RECORD), page.read(page.EARLIER)) == text, "tools/run_clients.py --page"


def test_record_has_every_client():
    assert set(json.loads(page.RECORD.read_text())["clients"]) == {client.name for client in CLIENTS}


def test_page_has_a_place_for_each_table():
    assert [[found[1] for found in page.MARKED.findall(path.read_text())] for path in page.PAGES] == [
        ["clients: setup", "clients: short"],
        ["clients: setup", "clients: earlier", "clients: full"],
    ]


def test_short_table_has_what_saves_most_and_what_differs():
    phases = [("few", 9, 1), ("many", 40, 20), ("same", 5, 5), ("more", 3, 4)]
    sides = {
        side: {
            **dict(groups=2, new_group=1000 if side == "stock" else 10, warnings=8, numbers={}),
            "phases": {name: dict(collectives=both[at], calls=1, seconds=[]) for name, *both in phases},
        }
        for at, side in enumerate(("stock", "overlay"))
    }
    results = {"a": dict(tensors=4, equal=4), "b": {"tensors": 4, "equal": 3, "largest difference": 0.002}}
    line = page.short({"clients": {"x": {"title": "X", "results": results, **sides}}}).splitlines()[-1]
    assert line == "| X | 1,000 → 10 | many 40 → 20; few 9 → 1 | 8 | b, by 2e-03 |"


def test_a_record_on_an_earlier_torch_takes_the_place_of_the_same_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "EARLIER", tmp_path / "earlier.json")
    monkeypatch.setattr(page, "write", lambda: None)
    page.EARLIER.write_text("[]")
    for release, version, why in (("2.11.0", 1, "w"), ("2.9.1", 1, "x"), ("2.9.1", 2, "y"), ("2.9.1", 1, "z")):
        client = {"title": "X", "script": "x.py", "packages": {"x": f"{version}.0"}, "failed": {"stock": why}}
        clients = {"x": client, "skipped": {"packages": {}}}
        run_clients.write_earlier({"torch": release, "python": "3.11", "clients": clients})
    rows = [row.split(" | ")[:3] for row in page.earlier(page.read(page.EARLIER)).splitlines()[2:]]
    assert rows == [
        ["| 2.9.1", "X (1.0)", "stock: `z`"],
        ["| 2.9.1", "X (2.0)", "stock: `y`"],
        ["| 2.11.0", "X (1.0)", "stock: `w`"],
    ]


# --- what is compared


def outcome(**more):
    """A run of one rank with a phase of 4 collectives."""
    rank = {"overlay": False, "new_group": 6, "groups": 3, "numbers": {}, "losses": [1.0, 2.0]}
    phase = {"kinds": {"all-reduce": 3, "all-gather": 1}, "new_group": 0, "calls": 2, "seconds": []}
    found = {"phases": {"step": phase}, **more}
    return launch.Outcome([rank | found], [{"weights": {"w": torch.ones(2), "b": torch.zeros(1)}}], [])


def test_one_bit_of_a_tensor_is_a_difference():
    stock, overlay = outcome().kept, outcome().kept
    overlay[0]["weights"]["w"] = torch.tensor([1.0, 1.0 + 2**-23])
    found = compare.results(stock, overlay)["weights"]
    assert found == {"tensors": 2, "equal": 1, "largest difference": 1.2e-07}


@pytest.mark.parametrize("other", [torch.ones(1, 2), torch.ones(2, dtype=torch.float64), None])
def test_another_shape_or_type_is_no_equality(other):
    stock, overlay = outcome().kept, outcome().kept
    if other is None:
        del overlay[0]["weights"]["w"]
    else:
        overlay[0]["weights"]["w"] = other
    assert compare.results(stock, overlay)["weights"]["largest difference"] == float("inf")


def test_losses_differ_by_a_part_of_themselves():
    assert compare.losses([[1.0, 4.0]], [[1.0, 4.5]]) == {"all": 2, "equal": 1, "largest difference": 0.12}


def test_a_warning_that_one_side_ends_is_named():
    """Whatever rank, time and process stand before it."""
    runs = {"stock": [outcome()], "overlay": [outcome()]}
    for rank in (0, 1):
        line = f"[rank{rank}]:W1122 13:50:0{rank}.08 1809{rank} torch/x.py:390] Two where one would do"
        runs["stock"][0].warnings.append(line)
    found = compare.entry(runs)
    assert found["warnings that differ"] == {"torch/x.py: Two where one would do": [2, 0]}
    assert (found["stock"]["warnings"], found["overlay"]["warnings"]) == (2, 0)


def test_a_failure_is_recorded_and_nothing_compared():
    found = compare.entry({"stock": [outcome()], "overlay": [launch.Outcome(failed="rank 3: ValueError: no")]})
    assert found == {"failed": {"overlay": "rank 3: ValueError: no"}}


def test_collectives_are_counted_for_one_call():
    entry = compare.entry({"stock": [outcome()], "overlay": [outcome(phases=one_call())]})
    assert ("collectives: step", 2, 3) in list(page._counts(entry))


def one_call():
    return {"step": {"kinds": {"all-reduce": 3}, "new_group": 0, "calls": 1, "seconds": []}}


def test_times_are_added_over_ranks_and_kept_by_run():
    """Rank 1 waits for rank 0 without using the processor."""
    run = outcome(phases={"step": one_call()["step"] | {"seconds": [0.5, 0.25]}})
    run.ranks.append(outcome(phases={"step": one_call()["step"] | {"seconds": [0.0, 0.25]}}).ranks[0])
    found = compare.entry({"stock": [run, run], "overlay": [run]})
    assert found["stock"]["phases"]["step"]["seconds"] == [[0.5, 0.5], [0.5, 0.5]]
    assert compare.gain(found["stock"]["phases"]["step"]["seconds"], [[0.1, 0.1]]) is None  # one run can't tell


def test_a_ratio_of_times_must_exceed_that_of_calls_that_do_the_same():
    """Two calls are faster by half and a third; only that of fewer collectives may, and only by more than the other."""

    def side(*phases):
        return {
            "phases": {name: dict(collectives=n, calls=1, seconds=s) for name, n, s in phases},
            "numbers": {},
        } | dict(groups=1, new_group=1, warnings=0)

    stock = side(("same", 2, [[3.0], [3.0]]), ("fewer", 4, [[6.0], [6.0]]), ("hardly", 4, [[2.2], [2.2]]))
    overlay = side(("same", 2, [[2.0], [2.0]]), ("fewer", 2, [[3.0], [3.0]]), ("hardly", 2, [[2.0], [2.0]]))
    more = {"title": "", "says": "", "ranks": 1, "script": "", "results": {}, "warnings that differ": {}}
    record = {"clients": {"x": {**more, "losses": {"all": 0}, "stock": stock, "overlay": overlay}}}
    assert page.scatter(record) == 1.5
    shown = [line.split("|")[-2].strip() for line in page.full(record).splitlines() if "processor time" in line]
    assert shown == ["noise", "2.00", "noise"]


# --- running


def test_the_two_commands_differ_in_the_run_alone(tmp_path):
    stock, overlay = (launch.command(CLIENTS[0], side, tmp_path) for side in ("stock", "overlay"))
    assert overlay == [stock[0], "-m", "torch_overlay", "run", *stock[1:]]


SCRIPT = """
import warnings
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from clients.inside import Session

session = Session()
dist.init_process_group("gloo")
session.phase("mesh", lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
total = torch.ones(1)
session.phase("sum", lambda: dist.all_reduce(total), repeats=2)
session.keep("mine", {"rank": torch.tensor(session.rank)})
warnings.warn("mind the gap")
session.close()
"""


def test_what_the_ranks_of_a_run_write_comes_back(tmp_path):
    """Two ranks under the overlay: their counts, their own tensors and their warnings, and that the overlay was on."""
    (tmp_path / "small.py").write_text(SCRIPT)
    found = launch.run(Client("small", "two ranks", ranks=2, folder=tmp_path), "overlay", timeout=250)
    assert found.failed is None
    for rank, notes in enumerate(found.ranks):
        assert notes["overlay"] is True
        assert notes["phases"]["sum"]["kinds"] == {"all-reduce": 1} and len(notes["phases"]["sum"]["seconds"]) == 2
        assert found.kept[rank]["mine"]["rank"] == rank
    of_script = [line for line in found.warnings if "small.py" in line]  # torch's profiler may have a word, too
    assert [line.endswith("UserWarning: mind the gap") for line in of_script] == [True, True]


def test_the_first_cause_is_named_and_not_its_echo():
    echo = "[rank0]: RuntimeError: gloo: Connection closed by peer"
    cause = "[rank1]: ValueError: tp 3 doesn't divide 4\n[rank1]:   and more"
    assert launch._reason({"0": echo, "1": cause}, "") == "rank 1: ValueError: tp 3 doesn't divide 4"
    assert launch._reason({"0": "no trace"}, "W1 a rank\nlast words\n=====\n") == "last words"
