"""From what a user calls a model to a folder on this machine, with as little network as possible.

    None                          the bundled checkpoint
    an existing path, or          that folder; no network, whatever it holds
      anything like one
    owner/name                    the Hub's cache if it holds the model completely, without asking
                                  anybody; a download otherwise

A cached model is used as it is and not compared with the Hub: name a `revision` to get another.
huggingface_hub is imported only when something has to be downloaded.

Not here: what the folder must hold (`checkpoint.py`).
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.checkpoint import bundled_checkpoint
from dgemma.checkpoint_files import missing_files
from dgemma.errors import CheckpointError

ALLOW_PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "README.md",
    "LICENSE*",
)
"""What is fetched: weights, configuration, tokenizer, template, and what may be done with them."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt")


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Something that came from the Hub once; who fetched it, the cache does not say."""

    repository: str
    revision: str
    """The commit."""
    names: tuple[str, ...]
    """Branches and tags of the cache that stand for this commit."""
    folder: Path


def resolve_model(model: str | Path | None, *, revision: str | None = None) -> Path:
    """The folder of a model, downloaded if need be.

    `revision` is a branch, tag or commit of a Hub repository. Raises `CheckpointError`, one line,
    where there is no such model or it cannot be fetched.
    """
    return _resolve(model, revision, fetch=not is_offline())


def resolve_cached(model: str | Path | None, *, revision: str | None = None) -> Path:
    """As `resolve_model`, but never downloads: what is not on this machine is an error."""
    return _resolve(model, revision, fetch=False)


def _resolve(model: str | Path | None, revision: str | None, *, fetch: bool) -> Path:
    if model is None:
        return bundled_checkpoint()
    path = Path(model).expanduser()
    # os.path.exists, unlike Path.exists, never raises.
    if isinstance(model, Path) or os.path.exists(path) or _looks_like_path(model):
        if not os.path.exists(path):
            raise CheckpointError(f"{path} does not exist; give a checkpoint folder or a Hub id")
        if revision is not None:
            raise CheckpointError(
                f"{path} is a folder on this machine; a revision belongs to a Hub id"
            )
        return path
    if _HUB_ID.fullmatch(model) is None or ".." in model or "--" in model:
        raise CheckpointError(
            f"{model!r} is neither a folder here nor a Hub id, which has the form owner/name"
        )
    return _from_hub(model, revision, fetch=fetch)


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by its own rules."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(cache or Path(home, "hub"))).expanduser()


def is_offline() -> bool:
    """Whether the user forbids network access, in the variables huggingface_hub reads."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def origin(folder: Path) -> Fetched | None:
    """Where a folder was fetched from; None: the folder bears no sign of the network."""
    folder = folder.absolute()
    storage = folder.parent.parent
    if folder.parent.name == "snapshots" and storage.name.startswith("models--"):
        return Fetched(
            repository=storage.name.removeprefix("models--").replace("--", "/"),
            revision=folder.name,
            names=tuple(name for name, commit in _refs(storage) if commit == folder.name),
            folder=folder,
        )
    # `hf download --local-dir` leaves one such file beside each it fetched.
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    try:
        commit = note.read_text("utf-8", errors="replace").split("\n", 1)[0].strip()
    except OSError:
        return None
    return Fetched(repository="unknown", revision=commit[:40], names=(), folder=folder)


def network_history() -> list[Fetched]:
    """DiffusionGemma checkpoints in the Hub's cache: what was ever fetched, and not deleted."""
    found: list[Fetched] = []
    for config in sorted(hub_cache().glob("models--*/snapshots/*/config.json")):
        try:
            mentions = "diffusion_gemma" in config.read_text("utf-8", errors="replace")
        except OSError:
            continue
        fetched = origin(config.parent) if mentions else None
        if fetched is not None:
            found.append(fetched)
    return found


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or model.endswith(("/", *_FILE_ENDINGS))
        or "\\" in model
        or model.count("/") > 1
        or Path(model).is_absolute()
    )


def _from_hub(repository: str, revision: str | None, *, fetch: bool) -> Path:
    named = _named(repository, revision)
    cached = _cached(repository, revision)
    missing = [] if cached is None else missing_files(cached)
    if cached is not None and not missing:
        return cached
    if not fetch:
        why = "; offline mode (HF_HUB_OFFLINE) forbids fetching it" if is_offline() else ""
        if cached is None:
            raise CheckpointError(f"{named} is not in the Hub cache ({hub_cache()}){why}")
        raise CheckpointError(
            f"{named} is only partly in the Hub cache: missing {_list(missing)}{why}"
        )
    folder = _download(repository, revision)
    missing = missing_files(folder)
    if missing:
        raise CheckpointError(
            f"{named} has no {_list(missing)}; it is no checkpoint that can be used here"
        )
    return folder


def _cached(repository: str, revision: str | None) -> Path | None:
    """The snapshot the cache holds for a revision, complete or not."""
    storage = hub_cache() / f"models--{repository.replace('/', '--')}"
    name = revision or "main"
    commit = name if _COMMIT.fullmatch(name) else dict(_refs(storage)).get(name)
    if commit is None or _COMMIT.fullmatch(commit) is None:
        return None
    folder = storage / "snapshots" / commit
    return folder if folder.is_dir() else None


def _refs(storage: Path) -> list[tuple[str, str]]:
    """(branch or tag, commit) pairs of a repository's cache."""
    root = storage / "refs"
    pairs: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*")):
        if path.is_file():
            pairs.append((path.relative_to(root).as_posix(), path.read_text().strip()))
    return pairs


def _download(repository: str, revision: str | None) -> Path:
    """Fetches a snapshot; a progress bar goes to standard error."""
    try:
        from huggingface_hub import errors

        # Typed as Any: its overloads are only partly annotated.
        huggingface_hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"{repository} has to be downloaded, but huggingface_hub cannot be imported ({error}); "
            "install it or give a folder"
        ) from error
    named = _named(repository, revision)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=list(ALLOW_PATTERNS),
            )
        )
    except errors.GatedRepoError as error:
        reason, cause = (
            "asks for an agreement; accept it on its page, then run `hf auth login`",
            error,
        )
    except errors.RevisionNotFoundError as error:
        reason, cause = "has no such revision on the Hub", error
    except errors.RepositoryNotFoundError as error:
        reason, cause = "is not on the Hub, or is private; check the spelling", error
    except errors.LocalEntryNotFoundError as error:
        reason, cause = "is not complete in the cache, and the Hub cannot be reached", error
    # The network libraries below huggingface_hub have changed more than once, their errors too.
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0][:160]
        reason, cause = f"could not be downloaded: {type(error).__name__}: {text}", error
    raise CheckpointError(f"{named} {reason}") from cause


def _named(repository: str, revision: str | None) -> str:
    return repository if revision is None else f"{repository} (revision {revision})"


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
