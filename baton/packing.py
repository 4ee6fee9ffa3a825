"""Packs values for another process of ours: Ray's workers, the simulation before an instance leaves.

Pickle alone gets frozen dataclasses of compiled modules wrong. If the reader is compiled, too, unpickling raises; if it
is interpreted, each field silently becomes its own name. So the reader uses compiled modules if the writer does
(`baton.compiled`), and such values are written field by field. Imports nothing that is compiled.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from io import BytesIO
from typing import Any


class _Packer(pickle.Pickler):
    """A pickler that takes frozen dataclasses apart."""

    def reducer_override(self, each: Any) -> Any:
        """See `pickle.Pickler`."""
        if is_dataclass(each) and not isinstance(each, type) and type(each).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return _frozen, (type(each), {field.name: getattr(each, field.name) for field in fields(each)})
        return NotImplemented


def packed(value: Any) -> bytes:
    """A value as `unpacked` reads it. Functions go by their module and name."""
    written = BytesIO()
    _Packer(written, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def unpacked(data: bytes) -> Any:
    """The value that `packed` wrote. Only for data of Baton's own processes: unpickling may run code."""
    return pickle.loads(data)  # noqa: S301 - a parent, a child or a Ray worker wrote it, and no network peer


def _frozen(kind: Any, values: Mapping[str, Any]) -> Any:
    """A frozen dataclass with these fields. `__init__` is not called: fields that it computes are in `values`."""
    made: Any = kind.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
