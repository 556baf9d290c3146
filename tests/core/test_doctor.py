"""`dgemma doctor`: every part of the report, and that one broken part never costs the others."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_folders import config_json, quantize, text_tensors, write_folder
from test_config import release

import dgemma
import mlx_dgemma
from dgemma import doctor, machine
from dgemma.checkpoint import bundled_checkpoint, open_checkpoint
from dgemma.config import ModelConfig
from dgemma.errors import DgemmaWarning

PARTS = {"versions", "backends", "memory", "checkpoint", "need", "fits", "fetched"}
BACKENDS = {
    "mlx": {"usable": True, "device": "Device(gpu, 0)", "name": "M9", "memory_bytes": 10**6},
    "cuda": {"usable": False, "reason": "torch is not installed"},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    """Frameworks take seconds to import; what matters of them is tested on its own below."""
    monkeypatch.setattr(machine, "backends", lambda: BACKENDS)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


# The report


def test_the_report_is_json_and_has_every_part():
    data = doctor.report()
    assert set(data) == PARTS
    assert json.loads(json.dumps(data)) == data
    assert "error" not in data["checkpoint"]


def test_the_text_says_what_the_report_says():
    data = doctor.report()
    text = doctor.render(data)
    for said in (
        "Versions",
        "numpy",
        "not usable: torch is not installed",
        "usable on M9",
        "canvas 128",
        "5.40 M parameters",
        "bundled with dgemma",
        "nothing was fetched",
    ):
        assert said in text
    assert not text.endswith("\n")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_bundled_checkpoint_is_described():
    part = doctor.describe_checkpoint(open_checkpoint(bundled_checkpoint()))
    raw = json.loads((bundled_checkpoint() / "config.json").read_text())
    assert part["format"] == "hf"
    assert part["layers"] == raw["text_config"]["num_hidden_layers"]
    assert part["full_layers"] == raw["text_config"]["layer_types"].count("full_attention")
    assert part["canvas_length"] == raw["canvas_length"]
    assert part["vision"]
    assert part["fetched"] is None
    # bf16 throughout, 5.40 M text parameters by its README.
    assert round(part["parameters"] / 1e6, 2) == 5.40
    assert {row["bits"] for row in part["classes"].values()} == {16.0}
    assert {stored for row in part["classes"].values() for stored in row["stored"]} == {"BF16"}
    assert sum(row["bytes"] for row in part["classes"].values()) == part["bytes"]
    assert set(part["classes"]) == {
        "embedding",
        "attention",
        "dense MLP",
        "experts",
        "router",
        "norms and scalars",
        "conditioning",
        "vision",
    }


def test_bits_of_each_class_include_scales(tmp_path, rng):
    """Affine: two 16-bit numbers a group; mxfp4: one byte. Router and norms stay at 16."""
    tensors = text_tensors(rng)
    quantize(tensors, rng, "model.decoder.embed_tokens", group_size=32, bits=8)
    for name in [name for name in tensors if ".experts." in name]:
        quantize(tensors, rng, name, group_size=32, bits=4, mode="mxfp4")
    settings = {
        "mode": "mxfp4",
        "group_size": 32,
        "bits": 4,
        "model.decoder.embed_tokens": {"group_size": 32, "bits": 8},
    }
    folder = write_folder(tmp_path, tensors, config=config_json(quantization=settings))
    checkpoint = open_checkpoint(folder)
    classes = doctor.describe_checkpoint(checkpoint)["classes"]
    assert classes["embedding"]["bits"] == 8 + 32 / 32
    assert classes["experts"]["bits"] == 4 + 8 / 32
    assert classes["router"]["bits"] == 16
    assert "mxfp4 4 bit, group 32" in classes["experts"]["stored"]
    dense = sum(8 * row["bytes"] / row["bits"] for row in classes.values())
    assert round(dense) == doctor.describe_checkpoint(checkpoint)["parameters"]


def test_memory_of_the_release_is_what_was_derived_for_it():
    """The release: 20,480 bytes a token in full layers; 204,800 (210 MB over the window) in
    sliding ones, where a canvas to rewind over and half as much again as room are kept as well."""
    config = ModelConfig.from_dict(release(per_layer=True))
    need = doctor.memory_need(SimpleNamespace(config=config, weight_bytes=51_647_562_456))
    assert need["prefix_bytes_per_1000_tokens"] == 20_480_000
    assert need["prefix_bytes_sliding_layers"] == 204_800 * (1024 + 256) * 3 // 2
    assert need["weights_bytes"] == 51_647_562_456


@pytest.mark.parametrize("free", [10**6, 10**12])
def test_need_is_compared_with_what_there_is(monkeypatch, free):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: free)
    data = doctor.report()
    assert data["fits"]["places"] == {"memory": free > 10**9, "mlx": False}
    text = doctor.render(data)
    assert ("in memory         fits" in text) == (free > 10**9)
    assert "in mlx            too large, needs" in text


def test_a_machine_that_tells_nothing_is_not_judged(monkeypatch):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: None)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: None)
    data = doctor.report()
    assert "memory" not in data["fits"]["places"]
    assert "unknown" in doctor.render(data)


def test_warnings_of_the_checkpoint_are_shown(tmp_path, rng):
    tensors = text_tensors(rng)
    tensors["junk.weight"] = tensors["model.decoder.norm.weight"]
    folder = write_folder(tmp_path / "model", tensors)
    data = doctor.report(folder)
    assert len(data["checkpoint"]["warnings"]) == 1
    assert "junk.weight" in doctor.render(data)
    with pytest.warns(DgemmaWarning):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json"),
        ("chat_template.jinja", "{% for %}", "no valid chat template"),
        ("chat_template.jinja", None, "1,024 tokens, no chat template"),
        ("README.md", None, "1,024 tokens, a chat template"),
    ],
)
def test_text_files_that_cannot_be_used_are_told(tmp_path, name, content, said):
    """Sound weights write no reply without a tokenizer."""
    folder = Path(shutil.copytree(bundled_checkpoint(), tmp_path / "model"))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    data = doctor.report(folder)
    assert said in data["checkpoint"]["text"]
    assert "\n" not in data["checkpoint"]["text"]
    assert said in doctor.render(data)


@pytest.mark.parametrize("model", ["./nowhere", "nobody/nothing", "nonsense"])
def test_an_absent_model_leaves_the_rest_of_the_report(model):
    data = doctor.report(model)
    assert set(data) == PARTS
    assert "\n" not in data["checkpoint"]["error"]
    text = doctor.render(data)
    assert "numpy" in text
    assert data["checkpoint"]["error"] in text
    assert "Traceback" not in text


def test_a_fetched_model_names_repository_and_revision(tmp_path, rng):
    snapshot = tmp_path / "cache" / "models--a--b" / "snapshots" / ("1" * 40)
    write_folder(snapshot, text_tensors(rng))
    (snapshot / "tokenizer.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    data = doctor.report("a/b")
    assert data["checkpoint"]["fetched"]["repository"] == "a/b"
    assert [item["names"] for item in data["fetched"]["from_hub"]] == [["main"]]
    text = doctor.render(data)
    assert text.count("the Hub: a/b, revision 111111111111 (main)") == 2


@pytest.mark.parametrize(
    "part", ["versions", "backends", "total_memory_bytes", "available_memory_bytes"]
)
def test_a_part_that_fails_is_one_line(monkeypatch, part):
    def broken():
        raise RuntimeError("something\nwith two lines")

    monkeypatch.setattr(machine, part, broken)
    data = doctor.report()
    text = doctor.render(data)
    assert "RuntimeError: something with two lines" in text
    assert "Traceback" not in text
    assert "canvas 128" in text
    assert json.dumps(data)


# The machine


def test_versions_name_what_is_and_what_is_not_installed():
    found = machine.versions()
    assert found["numpy"] == np.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["dgemma"].startswith(dgemma.__version__)
    assert set(machine.PACKAGES) < set(found)


def test_memory_is_plausible():
    total, available = machine.total_memory_bytes(), machine.available_memory_bytes()
    assert total is not None
    assert total > 2**28
    if sys.platform == "linux":
        assert available is not None
        assert 0 < available <= total


def real_backends(*folders):
    """`machine.backends()` of a fresh process in which `folders` come first."""
    script = "import json; from dgemma import machine; print(json.dumps(machine.backends()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libmlx.so: cannot open shared object file')", "libmlx.so"),
        ("import os; os.abort()", "killed by signal"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("raise ImportError('first line\\nlast line')", "first line"),
    ],
)
def test_a_broken_framework_is_one_line(tmp_path, source, said):
    """B107: plain mlx on Linux has no libmlx.so; other builds abort the whole process."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(source)
    found = real_backends(tmp_path)
    assert not found["mlx"]["usable"]
    assert said in found["mlx"]["reason"]
    assert "\n" not in found["mlx"]["reason"]


def test_an_absent_framework_names_the_extra_to_install(tmp_path):
    """B107."""
    (tmp_path / "mlx.py").write_text("raise ModuleNotFoundError(\"No module named 'mlx'\")")
    found = real_backends(tmp_path)
    assert "No module named 'mlx'" in found["mlx"]["reason"]
    assert "dgemma[mlx]" in found["mlx"]["reason"]


def test_a_backend_that_is_not_there_yet_says_so():
    assert "not built yet" in real_backends()["cuda"]["reason"]


def test_mlx_without_metal_or_device_info_is_told_as_it_is(monkeypatch):
    """B108: no Metal, or an MLX without `device_info`, is no reason to fail."""
    mx = pytest.importorskip("mlx.core")
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.delattr(mx, "device_info")
    state = mlx_dgemma.probe()
    assert (state["metal"], state["name"], state["memory_bytes"]) == (False, "unknown", None)
    assert state["choices"]["experts"]
    assert callable(mlx_dgemma.probe)  # not shadowed by a submodule that was imported meanwhile


@pytest.mark.slow
def test_the_frameworks_of_this_machine_are_found():
    pytest.importorskip("mlx.core")
    found = real_backends()
    assert found["mlx"]["usable"], found["mlx"]
    assert isinstance(found["cuda"]["usable"], bool)


# What the core imports


def core_files():
    return sorted(Path(dgemma.__file__).parent.rglob("*.py"))


def test_nothing_at_run_time_imports_transformers():
    """B110: an old transformers, or none, cannot matter."""
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in ("transformers", "torch", "mlx"), path


def test_the_core_imports_without_any_framework():
    """B107 and B110: config, checkpoint, hub and doctor need NumPy and the standard library."""
    script = (
        "import sys\n"
        "for name in ('mlx', 'torch', 'transformers', 'huggingface_hub', 'tokenizers', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from dgemma import checkpoint, config, doctor, hub, machine\n"
        "checkpoint.open_checkpoint(hub.resolve_model(None))\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
