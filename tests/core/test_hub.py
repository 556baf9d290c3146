"""Finding a model by name: no network where none is needed, one line where it fails (B109).

The Hub is a small HTTP server of this machine, asked by the real huggingface_hub in a process of
its own, because that library reads its settings when it is imported.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dgemma import hub
from dgemma.checkpoint import bundled_checkpoint
from dgemma.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
REPOSITORY = "someone/tiny-diffusion"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """A cache of its own, and a machine on which any connection is a failure."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)


@pytest.fixture
def no_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


def cache(files=FILES, *, commit=COMMIT, ref="main", repository=REPOSITORY, index=()):
    """A repository in the Hub's cache, laid out as huggingface_hub does."""
    storage = hub.hub_cache() / f"models--{repository.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    (storage / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    if ref:
        (storage / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (storage / "refs" / ref).write_text(commit)
    for name in files:
        blob = storage / "blobs" / hashlib.sha256(f"{commit}{name}".encode()).hexdigest()
        blob.write_text('{"model_type": "diffusion_gemma"}')
        (snapshot / name).symlink_to(blob)
    if index:
        weight_map = {f"tensor.{i}": file for i, file in enumerate(index)}
        text = json.dumps({"weight_map": weight_map})
        (snapshot / "model.safetensors.index.json").write_text(text)
    return snapshot


def failure(model, **options):
    with pytest.raises(CheckpointError) as caught:
        hub.resolve_model(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# No network


def test_no_name_is_the_bundled_checkpoint(no_hub_library):
    assert hub.resolve_model(None) == bundled_checkpoint()
    assert (bundled_checkpoint() / "model.safetensors").is_file()


def test_a_folder_needs_neither_network_nor_library(no_hub_library, tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model(folder) == folder
    assert hub.resolve_model(str(folder)) == folder
    # A folder that looks like a Hub id is still a folder.
    assert hub.resolve_model("owner/name") == Path("owner/name")
    assert hub.resolve_model("./owner") == Path("owner")


def test_a_home_folder_is_expanded(no_hub_library, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "model",
    [
        "./nowhere",
        "../nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "a/b/c",
        "models/",
        "a\\b",
        "model.gguf",
        Path("someone/absent"),
    ],
)
def test_an_absent_path_is_said_without_asking_the_hub(no_hub_library, model):
    assert "does not exist" in failure(model)


@pytest.mark.parametrize("model", ["gemma", "", "a b/c", "..", "a/..", "x" * 5000, "a\0b/c", "/"])
def test_what_is_no_name_at_all_is_said(no_hub_library, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if model in ("..", "/", ""):
        # An existing folder, and the current one: not checkpoints, but `open_checkpoint` says so.
        assert hub.resolve_model(model).is_dir()
    else:
        failure(model)


def test_a_revision_of_a_folder_is_refused(tmp_path):
    assert "revision" in failure(tmp_path, revision="main")


# Cached


@pytest.mark.parametrize("offline", [False, True])
def test_a_cached_model_loads_without_asking_anybody(no_hub_library, monkeypatch, offline):
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cache()
    assert hub.resolve_model(REPOSITORY) == snapshot
    assert hub.resolve_cached(REPOSITORY) == snapshot


def test_a_cached_revision_is_found_by_branch_tag_and_commit(no_hub_library):
    main = cache()
    other = cache(commit=OTHER, ref="refs/pr/1")
    assert hub.resolve_model(REPOSITORY) == main
    assert hub.resolve_model(REPOSITORY, revision="refs/pr/1") == other
    assert hub.resolve_model(REPOSITORY, revision=OTHER) == other
    assert hub.resolve_model(REPOSITORY, revision=COMMIT) == main


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("revision", [None, "v2", OTHER])
def test_offline_and_not_cached_is_said_at_once(no_hub_library, monkeypatch, variable, revision):
    monkeypatch.setenv(variable, "true")
    if revision is not None:
        cache()  # another revision is there
    start = time.perf_counter()
    message = failure(REPOSITORY, revision=revision)
    assert time.perf_counter() - start < 2
    assert REPOSITORY in message
    assert "not in the Hub cache" in message
    assert "HF_HUB_OFFLINE" in message
    assert revision is None or revision in message


@pytest.mark.parametrize(
    ("files", "index", "missing"),
    [
        (("config.json", "tokenizer.json"), (), ["model.safetensors"]),
        (("config.json", "model.safetensors"), (), ["tokenizer.json"]),
        (("tokenizer.json", "model.safetensors"), (), ["config.json"]),
        (
            ("config.json", "tokenizer.json", "model-00001-of-00003.safetensors"),
            [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)],
            ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"],
        ),
        (
            ("config.json", "tokenizer.json", "model-00002-of-00002.safetensors"),
            (),
            ["model-00001-of-00002.safetensors"],
        ),
    ],
)
def test_offline_and_partly_cached_names_the_missing_files(
    no_hub_library, monkeypatch, files, index, missing
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache(files, index=index)
    message = failure(REPOSITORY)
    for name in missing:
        assert name in message


def test_a_link_to_a_deleted_blob_is_a_missing_file(no_hub_library, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cache()
    (snapshot / "model.safetensors").resolve().unlink()
    assert "model.safetensors" in failure(REPOSITORY)


def test_a_missing_library_is_said(no_hub_library):
    assert "huggingface_hub" in failure(REPOSITORY)


def test_resolve_cached_never_downloads(no_hub_library):
    with pytest.raises(CheckpointError, match="not in the Hub cache"):
        hub.resolve_cached(REPOSITORY)


# What was fetched


def test_the_origin_of_a_snapshot_is_told(tmp_path):
    snapshot = cache(repository="a/b-c")
    fetched = hub.origin(snapshot)
    assert (fetched.repository, fetched.revision, fetched.names) == ("a/b-c", COMMIT, ("main",))
    assert hub.origin(tmp_path) is None
    assert hub.origin(bundled_checkpoint()) is None


def test_a_folder_downloaded_elsewhere_tells_its_revision(tmp_path):
    note = tmp_path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\nabcdef\n123.4\n")
    assert hub.origin(tmp_path).revision == COMMIT


def test_the_history_lists_this_kind_of_model_only():
    assert hub.network_history() == []
    one, two = cache(repository="a/b"), cache(repository="c/d", commit=OTHER, ref="")
    other = cache(repository="e/f")
    (other / "config.json").unlink()
    (other / "config.json").write_text('{"model_type": "llama"}')
    assert [(item.folder, item.names) for item in hub.network_history()] == [
        (one, ("main",)),
        (two, ()),
    ]


def test_the_cache_is_where_huggingface_hub_keeps_it(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    script = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    assert constants.HF_HUB_CACHE
    for changes in (
        {"HF_HUB_CACHE": "/x/hub"},
        {"HF_HOME": "/x/home"},
        {"XDG_CACHE_HOME": "/x/cache"},
        {"HUGGINGFACE_HUB_CACHE": "/x/old"},
        {},
    ):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
            if name in changes:
                monkeypatch.setenv(name, changes[name])
        theirs = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert str(hub.hub_cache()) == theirs


# A Hub to ask


class FakeHub(BaseHTTPRequestHandler):
    """Just enough of the Hub's API for one repository; counts the requests."""

    files: dict[str, bytes] = {}  # noqa: RUF012 (set by the fixture)
    failing: tuple[int, str] | None = None
    requests: list[str] = []  # noqa: RUF012

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        type(self).requests.append(self.path)
        path = self.path.split("?")[0]
        if self.failing is not None:
            status, code = self.failing
            return self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.answer(200, json.dumps(info).encode())
        prefix = f"/{REPOSITORY}/resolve/{COMMIT}/"
        data = self.files.get(path.removeprefix(prefix))
        if not path.startswith(prefix) or data is None:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return self.answer(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args):
        pass


@pytest.fixture
def fake_hub():
    class Handler(FakeHub):
        pass

    names = (*FILES, "README.md", "x.bin")
    Handler.files = {name: f"{name} content".encode() for name in names}
    Handler.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.url = f"http://127.0.0.1:{server.server_port}"
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_elsewhere(url, model=REPOSITORY, revision=None, **environment):
    """`resolve_model` in a fresh process that can reach `url` as the Hub: (stdout, stderr)."""
    script = (
        "import sys, dgemma.hub as hub, dgemma.errors as errors\n"
        "try:\n    print(hub.resolve_model(sys.argv[1], revision=sys.argv[2] or None))\n"
        "except errors.CheckpointError as error:\n    print('error:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, model, revision or ""],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
    )
    assert done.stdout.count("\n") == 1, done.stdout
    return done.stdout.strip(), done.stderr


def test_a_download_fetches_what_is_needed_once(fake_hub):
    """Progress on stderr, nothing but the result on stdout; the second time asks nobody."""
    out, err = resolve_elsewhere(fake_hub.url)
    folder = Path(out)
    assert folder.parent.parent.parent == hub.hub_cache()
    fetched = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert fetched == {name: fake_hub.files[name] for name in (*FILES, "README.md")}
    assert "%" in err
    assert hub.origin(folder).repository == REPOSITORY
    count = len(fake_hub.requests)
    assert count > 0
    assert resolve_elsewhere(fake_hub.url)[0] == out
    assert len(fake_hub.requests) == count


def test_an_interrupted_download_is_completed(fake_hub):
    first = Path(resolve_elsewhere(fake_hub.url)[0])
    (first / "model.safetensors").resolve().unlink()
    (first / "model.safetensors").unlink()
    assert (resolve_elsewhere(fake_hub.url)[0]) == str(first)
    assert (first / "model.safetensors").read_bytes() == fake_hub.files["model.safetensors"]


def test_a_repository_without_weights_is_said(fake_hub):
    del fake_hub.files["model.safetensors"]
    out, _ = resolve_elsewhere(fake_hub.url)
    assert out.startswith(f"error: {REPOSITORY} has no model.safetensors")


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ((404, "RepoNotFound"), "spelling"),
        ((404, "RevisionNotFound"), "revision"),
        ((403, "GatedRepo"), "agreement"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(fake_hub, failing, said):
    fake_hub.failing = failing
    out, err = resolve_elsewhere(fake_hub.url, revision="v7")
    assert out.startswith(f"error: {REPOSITORY}")
    assert said in out
    assert "Traceback" not in err


def test_no_network_is_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        out, err = resolve_elsewhere(url)
    assert out.startswith(f"error: {REPOSITORY}")
    assert "cannot be reached" in out
    assert "Traceback" not in err


def test_offline_mode_asks_nobody(fake_hub):
    start = time.perf_counter()
    out, _ = resolve_elsewhere(fake_hub.url, HF_HUB_OFFLINE="1")
    assert time.perf_counter() - start < 2
    assert "not in the Hub cache" in out
    assert fake_hub.requests == []
