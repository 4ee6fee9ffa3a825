"""Identifies the weights that an engine will serve: equal files get equal names on every machine.

Two instances may serve one name with different weights, while a model is being replaced or one machine lacks the new
folder. They must hand nothing over: the KV of one is useless to the other, and no layout tells them apart.

The name of a folder is a digest, whatever the folder is called: of its configuration, tokenizer, templates, generation
defaults, and samples of its weight files. (Reading a whole model takes as long as loading it.) Another training run
changes nearly every tensor, so samples differ. A change of a few tensors in files of the same size can be missed, and
needs a name of its own (`baton engine --weights`). The name of a model on the hub is the commit.
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
"""Files that are read whole: they decide how an instance tokenizes a prompt, and how it draws tokens if a request
leaves that open. ``*.jinja`` files (chat templates) are read whole, too."""

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES: Final = 16
"""Samples of each file, evenly spread, with both ends among them."""
SAMPLE_BYTES: Final = 65536
"""Bytes of a sample. In all about a megabyte a file: a model of 30 files is named within a second, also from a network
disk."""


def weights_of(model: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """The name of the weights in a folder, in a file, or of a model on the hub (`revision`: as given to vLLM). Empty:
    unknown, as for a model that is still to be downloaded.
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
    """A digest of a LoRA adapter's whole folder on this machine (adapters are small). Empty: there is none."""
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
    """Marks that change when an adapter's files are touched, without reading them; empty if there are no files."""
    try:
        told = [(file.name, file.stat()) for file in _files_of(root)]
    except OSError:
        return ()
    return tuple((name, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) for name, seen in told)


def _files_of(root: str) -> list[Path]:
    """The files in an adapter's folder that identify the adapter."""
    path = Path(root)
    try:
        if not root or not path.is_dir():
            return []
        return sorted(each for each in path.iterdir() if each.suffix in SUFFIXES or each.name in _ADAPTER_FILES)
    except OSError:
        return []


_ADAPTER_FILES: Final = frozenset({"adapter_config.json"})


def _of_files(files: list[Path], whole: list[Path]) -> str:
    """A digest of samples of these files, and of the `whole` files."""
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
    """A hub model's name and the commit that this machine's hub cache has of it; empty: it has none."""
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub") / f"models--{name.replace('/', '--')}"
    reference = cache / "refs" / revision
    if reference.is_file():
        return f"{name}@{reference.read_text().strip()}"
    return f"{name}@{revision}" if (cache / "snapshots" / revision).is_dir() else ""
