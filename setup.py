"""Name, version, entry point, dependencies. The torch range is read from torch_overlay/versions.py, not imported."""

import ast
import pathlib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent


def supported() -> tuple[str, ...]:
    """The torch releases named by ``SUPPORTED = (...)`` in versions.py, oldest first."""
    tree = ast.parse((HERE / "torch_overlay" / "versions.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "SUPPORTED" for target in targets):
            return ast.literal_eval(node.value)
    raise SystemExit("torch_overlay/versions.py has no module-level SUPPORTED = ('X.Y.Z', ...); setup.py needs it")


# A bug-fix release of a supported minor is let in: whether its bodies are known is for enable() to say, not for pip.
OLDEST, NEWEST = supported()[0], supported()[-1].split(".")
TORCH = f"torch>={OLDEST},<{NEWEST[0]}.{int(NEWEST[1]) + 1}"

setup(
    name="torch-overlay",
    version="0.1.0",
    description="A better DeviceMesh and DTensor redistribute for a released PyTorch, in place and without a rebuild",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="torch_overlay contributors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    classifiers=["Programming Language :: Python :: 3", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    python_requires=">=3.10",
    packages=find_packages(include=["torch_overlay", "torch_overlay.*"]),
    package_data={"torch_overlay": ["py.typed", "_startup/*.py"]},
    include_package_data=False,
    install_requires=[TORCH],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "hypothesis>=6.100", "expecttest", "numpy", "sybil>=8"],
        "tools": ["rich", "matplotlib", "libcst", "nox", "lintrunner", "lintrunner-adapters"],
        "docs": ["sphinx", "myst-parser"],
        "titan": ["torchtitan==0.3.0; python_version >= '3.11'"],
    },
    entry_points={"console_scripts": ["torch-overlay = torch_overlay.__main__:main"]},
)
