"""Who may import whom, read from the source; and what an import really brings in.

tests -> everything;   mlx_dgemma -> dgemma <- cuda_dgemma;   dgemma_convert -> dgemma
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "dgemma": ROOT / "shared" / "dgemma",
    "mlx_dgemma": ROOT / "mlx_dgemma",
    "cuda_dgemma": ROOT / "cuda_dgemma",
    "dgemma_convert": ROOT / "convert" / "dgemma_convert",
}
ALLOWED = {
    "dgemma": {"numpy"},
    "mlx_dgemma": {"numpy", "dgemma", "mlx"},
    "cuda_dgemma": {"numpy", "dgemma", "torch", "triton"},
    "dgemma_convert": {"numpy", "dgemma"},
}
# What talks brings its library; everything else in the core has NumPy and the standard library.
TALKS = {
    "tokenizer.py": {"tokenizers"},
    "chat.py": {"jinja2"},
    "template_sandbox.py": {"jinja2"},
    "hub.py": {"huggingface_hub"},
    "view.py": {"rich"},
    "server": {"starlette", "uvicorn"},
    "bench": {"matplotlib"},
}
HEAVY = ("numpy", "mlx", "torch", "tokenizers", "jinja2", "rich", "huggingface_hub", "transformers")
FRAMEWORKS = ("mlx", "torch", "triton", "transformers")


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of everything a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add((node.module or "").partition(".")[0])
    return names


def foreign(path: Path) -> set[str]:
    return imported(ast.parse(path.read_text("utf-8"))) - sys.stdlib_module_names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str):
    assert sources(package), f"{package} has no modules"
    for path in sources(package):
        inside = path.relative_to(PACKAGES[package])
        allowed = ALLOWED[package] | {package}
        if package == "dgemma":
            allowed |= TALKS.get(inside.parts[0], set())
        surplus = foreign(path) - allowed
        assert not surplus, f"{package}/{inside} imports {sorted(surplus)}"


def test_nothing_shipped_imports_the_tests():
    for package in PACKAGES:
        for path in sources(package):
            assert not {"tests", "pytest", "hypothesis"} & foreign(path), path


def test_the_backend_package_does_not_import_its_command():
    """`python -m mlx_dgemma.generate` would then warn, and the function shadow the module."""
    for package in ("mlx_dgemma", "cuda_dgemma"):
        tree = ast.parse((PACKAGES[package] / "__init__.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert f"{package}.generate" not in {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module != f"{package}.generate"
                assert not (node.module == package and "generate" in {a.name for a in node.names})


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after `statement`."""
    script = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "brings"),
    [
        ("dgemma", set[str]()),
        ("dgemma.errors", set[str]()),
        ("dgemma.config", set[str]()),
        ("dgemma.terminal", set[str]()),
        ("dgemma.cli", set[str]()),
        ("dgemma.sampler", {"numpy"}),
        ("dgemma.scheduler", {"numpy"}),
        ("dgemma.decoders.hybrid", {"numpy"}),
        ("dgemma.testing", {"numpy"}),
        ("dgemma.tokenizer", set[str]()),
        ("dgemma.text", set[str]()),
        ("dgemma.chat", set[str]()),
        ("dgemma.model", {"numpy"}),
        ("dgemma_convert", set[str]()),
        ("cuda_dgemma", set[str]()),
    ],
)
def test_importing_a_module_brings_only_what_it_needs(module: str, brings: set[str]):
    surplus = (modules_after(f"import {module}") & set(HEAVY)) - brings
    assert not surplus


@pytest.mark.parametrize("module", ["dgemma.model", "dgemma.view", "dgemma.doctor"])
def test_the_core_brings_no_framework(module: str):
    assert not modules_after(f"import {module}") & set(FRAMEWORKS)


def test_the_view_imports_rich_on_demand():
    assert "rich" not in modules_after("import dgemma.view")
