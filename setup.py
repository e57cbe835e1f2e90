"""Name, version, entry point, dependencies. What the package knows of itself is read from it without importing it."""

import ast
import pathlib
import re
import subprocess

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent


def constant(file: str, name: str):
    """The literal that a file of the package assigns to a name at module level."""
    for node in ast.parse((HERE / "torch_overlay" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise SystemExit(f"torch_overlay/{file} has no line `{name} = ...`, which setup.py reads")


def home() -> str:
    """Where this clone came from, as a web address; empty for a folder that was cloned from no web host."""
    if not (HERE / ".git").exists():  # unpacked, maybe inside of somebody's clone
        info = HERE / "PKG-INFO"  # in an sdist, which was built in a clone
        told = re.search(r"^Home-page: (\S+)$", info.read_text(encoding="utf-8"), re.M) if info.exists() else None
        return told[1] if told else ""
    asked = ["git", "-C", str(HERE), "config", "--get", "remote.origin.url"]
    try:
        url = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""
    found = re.fullmatch(r"(?:https://(?:[^@/]+@)?|git@|ssh://git@)([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", url)
    return f"https://{found[1]}/{found[2]}" if found else ""


def description(url: str) -> str:
    """The README, whose links lead into the clone's home where there is one: an index of packages has no files."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not url:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1{url}/raw/HEAD/", text)
    return re.sub(r"((?<!!)\[(?:[^][]|!\[[^]]*\]\([^)]*\))*\]\()(?!\w+:|#)", rf"\1{url}/blob/HEAD/", text)


URL = home()
PAGES = {"Documentation": "/tree/HEAD/docs", "Issues": "/issues", "Source": ""}
DEMO, PLOT = ["rich"], ["matplotlib"]
TEST = [
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis>=6.100",
    "expecttest",
    "numpy",
    "safetensors",
    "sybil>=8",
]

setup(
    name="torch-overlay",
    version=constant("version.py", "__version__"),
    description="A better DeviceMesh and DTensor redistribute for a released PyTorch, in place and without a rebuild",
    long_description=description(URL),
    long_description_content_type="text/markdown",
    url=URL or None,
    project_urls={name: URL + page for name, page in PAGES.items()} if URL else {},
    author="torch_overlay contributors",
    keywords=["pytorch", "distributed", "device mesh", "dtensor", "fsdp", "tensor parallel"],
    license_expression="BSD-3-Clause",
    license_files=["LICENSE"],
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # So that an editable install is a plain path, which type checkers read, instead of a hook, which they don't.
    package_dir={"": "."},
    packages=find_packages(include=["torch_overlay", "torch_overlay.*"]),
    package_data={"torch_overlay": ["py.typed", "fingerprints.json"]},
    include_package_data=False,
    install_requires=["torch" + constant("versions.py", "REQUIRED")],
    extras_require={
        "demo": DEMO,
        "plot": PLOT,
        "vllm": ["vllm==0.33.0"],  # which pins its torch
        "test": [*TEST, *DEMO, *PLOT],
        "dev": [
            "nox",
            "lintrunner",
            "lintrunner-adapters",
            "ghstack",
            "graphql-core",
            "ruff==0.17.6",
        ],
        "docs": ["sphinx>=8", "myst-parser>=4", "furo"],
        "titan": ["torchtitan==0.3.0; python_version >= '3.11'"],
    },
    entry_points={
        "console_scripts": ["torch-overlay = torch_overlay.__main__:main"],
        "vllm.general_plugins": ["torch_overlay = torch_overlay.integrations.vllm:register"],
    },
)
