"""Which weights an engine will serve: a name for them that is the same wherever the same files are.

Two instances that serve one name with other weights (a model that is being replaced, a folder that one machine has not
been given yet) must hand nothing over: one's KV means nothing to the other, and no layout tells them apart.

Of a folder it is a digest of its configuration, tokenizer and templates, of what its generation is by default, and of
samples of its weight files, whatever the folder is called: to
read all of a model takes as long as to load it. Another training run changes nearly every tensor, so that samples
differ; a change of a few tensors in files of the same size can be missed, and wants a name of its own (`baton engine
--weights`). Of a model on the hub it is the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

TOLD: Final = frozenset({
    "chat_template.json", "config.json", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "tekken.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
})  # fmt: skip
"""Read whole: by these an instance reads a prompt as other tokens, or draws other ones where a request leaves it open.
(And ``*.jinja``, templates of chats.)"""

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES: Final = 16
"""Of each file, evenly spread, its two ends among them."""
SAMPLE_BYTES: Final = 65536
"""In all about a megabyte a file: a model of 30 files is named within a second, from a disk of the network, too."""


def weights_of(model: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """Of a folder, a file, or a name on the hub (`revision`: as given to vLLM). Empty: it cannot be told, as of a model
    that is still to be downloaded.
    """
    path = Path(model)
    try:
        if path.is_dir():
            told = sorted(each for each in path.iterdir() if each.name in TOLD or each.suffix == ".jinja")
            return _of_files(sorted(each for each in path.iterdir() if each.suffix in SUFFIXES), told)
        if path.is_file():
            return _of_files([path], [])
        return _of_hub(model, revision or "main", environ)
    except OSError:
        return ""


def adapter_of(root: str) -> str:
    """Of a LoRA adapter's folder on this machine: a digest of all of it (adapters are small). Empty: there is none."""
    digest = hashlib.blake2b(digest_size=12)
    files = _files_of(root)
    try:
        for file in files:
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as source:
                while piece := source.read(1 << 20):
                    digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest() if any(file.suffix in SUFFIXES for file in files) else ""


def adapter_marks(root: str) -> tuple[object, ...]:
    """By which one sees, without reading them, that an adapter's files were touched; none where there are none."""
    try:
        told = [(file.name, file.stat()) for file in _files_of(root)]
    except OSError:
        return ()
    return tuple((name, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) for name, seen in told)


def _files_of(root: str) -> list[Path]:
    """What of an adapter's folder says which adapter it is."""
    path = Path(root)
    try:
        if not root or not path.is_dir():
            return []
        return sorted(each for each in path.iterdir() if each.suffix in SUFFIXES or each.name in _ADAPTER_FILES)
    except OSError:
        return []


_ADAPTER_FILES: Final = frozenset({"adapter_config.json"})


def _of_files(files: list[Path], whole: list[Path]) -> str:
    """Of samples of these files, and of all of those."""
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=12)
    for file in whole:
        content = file.read_bytes()
        digest.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as source:
            for number in range(SAMPLES):
                source.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _of_hub(name: str, revision: str, environ: Mapping[str, str]) -> str:
    """The commit that the hub's cache on this machine has under this name."""
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub") / f"models--{name.replace('/', '--')}"
    reference = cache / "refs" / revision
    if reference.is_file():
        return f"{name}@{reference.read_text().strip()}"
    return f"{name}@{revision}" if (cache / "snapshots" / revision).is_dir() else ""
