"""One distribution, one test command, one help text: what the files say of each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from regenerate_readme import README, regenerated
from scripted_model import ScriptedModel, install

import dgemma
from dgemma.errors import DgemmaError

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CI = (ROOT / ".ci" / "run").read_text("utf-8")
PACKAGES = ("dgemma", "dgemma_convert", "mlx_dgemma", "cuda_dgemma")


def requirements() -> list[str]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["mlx"], *extras["test"]]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def constraints() -> dict[str, str]:
    lines = (ROOT / ".ci" / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line.partition("#")[0].strip() for line in lines]
    return {name_of(pin): pin.split("==")[1] for pin in pins if pin}


def test_the_version_is_said_once():
    assert PYPROJECT["project"]["version"] == dgemma.__version__


def test_every_requirement_of_the_test_environment_is_pinned():
    pins = constraints()
    for requirement in requirements():
        assert name_of(requirement) in pins, requirement
    assert pins["torch"] == "2.13.0"


def test_ci_runs_the_readmes_test_command():
    """The README's block behind its marker is what `.ci/run` runs, letter for letter."""
    found = re.search(
        r"<!-- test command -->\n```\n(.+?)\n```", README.read_text("utf-8"), re.DOTALL
    )
    assert found, "the README has no test command behind its marker"
    install, _, test = found[1].partition(" && ")
    assert test
    assert f"run {install}\n" in CI
    assert f"run {test}\n" in CI


def test_ci_checks_style_and_types_and_stops_at_the_first_failure():
    assert "set -euo pipefail" in CI
    for command in ("ruff check", "ruff format --check", "pyright"):
        assert f"run {command}" in CI
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert not re.search(r"\|\|\s*true", CI)


def test_the_readmes_help_is_the_parsers():
    """`python tests/regenerate_readme.py` writes it anew.

    Spaces do not count: Python versions wrap a usage line differently.
    """
    text = README.read_text("utf-8")
    assert text.split() == regenerated(text).split()


def test_the_readmes_python_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = re.search(r"```python\n(.+?)```", README.read_text("utf-8"), re.DOTALL)
    assert found
    monkeypatch.setitem(sys.modules, "mlx_dgemma", None)
    install(ScriptedModel("yes", context=64))
    exec(compile(found[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("yes stop 7 2\n")


def test_every_error_for_users_is_a_dgemma_error():
    from dgemma.terminal import OutputError

    assert issubclass(OutputError, DgemmaError)


@pytest.mark.slow
def test_a_built_wheel_works_where_no_source_is(tmp_path: Path):
    """Wheel by way of the sdist, as an index would do it; the script runs far from the sources."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    wheel_command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*wheel_command, str(sdist)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(PACKAGES), "nothing called shared, convert or tests is installed"
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        assert f"dgemma/tiny/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    target = [*pip, "--python", str(scripts / "python"), "install", "--no-deps", str(wheel)]
    subprocess.run(target, check=True, capture_output=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(scripts / "dgemma"), "generate", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--max-new-tokens" in done.stdout
