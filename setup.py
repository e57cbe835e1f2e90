"""Name, version, entry point, dependencies. What the package knows of itself is read from it without importing it."""

import ast
import pathlib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent


def constant(file: str, name: str):
    """The literal that a file of the package assigns to a name at module level."""
    for node in ast.parse((HERE / "torch_overlay" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise SystemExit(f"torch_overlay/{file} has no line `{name} = ...`, which setup.py reads")


SUPPORTED = constant("versions.py", "SUPPORTED")
# A bug-fix release of a supported minor is let in: whether its bodies are known is for enable() to say, not for pip.
MAJOR, MINOR, _ = map(int, SUPPORTED[-1].split("."))
TORCH = f"torch>={SUPPORTED[0]},<{MAJOR}.{MINOR + 1}"

setup(
    name="torch-overlay",
    version=constant("__init__.py", "__version__"),
    description="A better DeviceMesh and DTensor redistribute for a released PyTorch, in place and without a rebuild",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="torch_overlay contributors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    classifiers=["Programming Language :: Python :: 3", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    python_requires=">=3.10",
    packages=find_packages(include=["torch_overlay", "torch_overlay.*"]),
    package_data={"torch_overlay": ["py.typed"]},
    include_package_data=False,
    install_requires=[TORCH],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis>=6.100", "expecttest", "numpy", "sybil>=8"],
        "tools": [
            "rich",
            "matplotlib",
            "libcst",
            "nox",
            "lintrunner",
            "lintrunner-adapters",
            "ghstack",
            "graphql-core",
            "ruff==0.17.6",
        ],
        "docs": ["sphinx", "myst-parser"],
        "titan": ["torchtitan==0.3.0; python_version >= '3.11'"],
    },
    entry_points={"console_scripts": ["torch-overlay = torch_overlay.__main__:main"]},
)
