"""The profiles, links and model configs that ship with the package, read once; a user's `config.json`. Only this module
opens files.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.errors import UsageError
from costs.config import read_config
from costs.model import ModelShape
from costs.profile import Profile, read_profiles
from costs.transfer import Link

LINKS_FILE = "links.json"

MODELOPT_FILE = "hf_quant_config.json"
"""NVIDIA's Model Optimizer before 0.31 wrote the format of the weights into this file beside ``config.json``."""


def _documents(folder: str) -> dict[str, Any]:
    files = sorted((resources.files("costs") / folder).iterdir(), key=lambda file: file.name)
    return {file.name: json.loads(file.read_text()) for file in files if file.name.endswith(".json")}


@functools.cache
def profiles() -> tuple[Profile, ...]:
    """Every fitted profile."""
    documents = (document for name, document in _documents("profiles").items() if name != LINKS_FILE)
    return tuple(profile for document in documents for profile in read_profiles(document))


@functools.cache
def links() -> Mapping[str, Link]:
    """Measured links by name."""
    document = _documents("profiles")[LINKS_FILE]
    return MappingProxyType({each["name"]: Link(**each["link"]) for each in document["links"]})


@functools.cache
def models() -> Mapping[str, ModelShape]:
    """The models whose config ships, by name and by the names of their fine-tunes."""
    found = {}
    for document in _documents("models").values():
        for name in (document["name"], *document["also"]):
            found[name] = read_config(document["config"], document["name"])
    return MappingProxyType(found)


@functools.cache
def _by_plain_name() -> Mapping[str, ModelShape]:
    return {word.lower(): shape for name, shape in models().items() for word in (name, name.rpartition("/")[2])}


def find_model(name: str) -> ModelShape | None:
    """The shape of a model by its name on Hugging Face, with or without the owner; None if its config does not ship."""
    return _by_plain_name().get(name.lower())


def model_named(name: str) -> ModelShape:
    """As `find_model`.

    Raises:
        UsageError: its config does not ship; the message names the nearest ones.
    """
    found = find_model(name)
    if found is None:
        near = difflib.get_close_matches(name.lower(), _by_plain_name(), n=3, cutoff=0.5)
        hint = f" Near: {', '.join(near)}." if near else ""
        raise UsageError(f"The sizes of the model {name!r} do not ship. Give its folder or config.json.{hint}")
    return found


def model_in(file: Path, name: str) -> ModelShape:
    """The shape of the model that a ``config.json`` describes. As in vLLM, Model Optimizer's own file beside it counts
    if ``config.json`` names no format of quantised weights.

    Raises:
        OSError: `file` cannot be read.
        UsageError: a field is missing, or is not what it must be; or the file beside cannot be read, or is no JSON.
            Names the file.
        ValueError: `file` is no JSON.
    """
    config = json.loads(file.read_bytes())
    beside = file.with_name(MODELOPT_FILE)
    named = not isinstance(config, dict) or config.get("quantization_config") is not None
    if named or not beside.is_file():
        return read_config(config, name)
    try:
        modelopt = json.loads(beside.read_bytes())
    except OSError as error:
        raise UsageError(f"{beside}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{beside} is no JSON: {error}") from None
    if not isinstance(modelopt, dict):
        raise UsageError(f"{beside}: {modelopt!r:.60} is no object.")
    return read_config(config, name, modelopt=modelopt, modelopt_file=str(beside))
