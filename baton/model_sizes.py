"""The sizes of a model that a command names: by a shipped config's name, a folder or config.json, or the tiny model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from baton.file_kinds import exists, is_folder
from cluster.errors import UsageError
from cluster.text_file import unreadable
from costs import shipped
from costs.model import ModelShape
from engine.tiny import NAME as TINY_NAME
from engine.tiny import model_path


def sizes_of(name: str) -> ModelShape:
    """A shipped model by its name, or a model by its folder or config.json.

    Raises:
        UsageError: the name is neither.
    """
    path = model_path() if name == TINY_NAME else Path(name)
    file = path / "config.json" if is_folder(path) else path
    if shipped.find_model(name) is None and file.suffix == ".json" and exists(file):
        try:
            return shipped.model_in(file, name)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        except OSError as error:
            raise unreadable(file, "", error, "give a model's folder, or its config.json") from None
        except ValueError as error:
            raise UsageError(f"{file}: no JSON ({error}); give a model's folder, or its config.json") from None
    return shipped.model_named(name)


def check_sizes(models: Iterable[str], words: Sequence[str]) -> None:
    """Check that mocks can imitate these models, before anything is started. `words`: flags of every mock.

    Raises:
        UsageError: the sizes of one are unknown, and no flag says how long its steps take.
    """
    if any(word.startswith(("--step-ms", "--prefill-ms-per-1k")) for word in words):
        return
    for model in dict.fromkeys(models):
        try:
            sizes_of(model)
        except UsageError as error:
            raise UsageError(f"{error} Or say how long its steps take: -- --step-ms 5 --prefill-ms-per-1k 20") from None
