"""Makes `docs/cluster-file.md` from the settings themselves, so that page and code cannot differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_args, get_origin

from cluster.spec.about import About, Setting, is_section, settings_of, shown_default
from cluster.spec.example import EXAMPLE
from cluster.spec.settings import (
    MEANINGS,
    ExtraPool,
    Hardware,
    KvTiers,
    Limits,
    Model,
    Pool,
    Pools,
    RegistrySettings,
    RouterSettings,
    Shape,
    SloClass,
    Spec,
    Tenant,
    Transfer,
)
from cluster.spec.tree import TEXT_CHARS_MAX
from cluster.spec.units import shown, unit_of

SECTIONS: tuple[tuple[str, type], ...] = (
    ("the file", Spec),
    ("`models[]`", Model),
    ("`models[].pools`", Pools),
    ("`models[].pools.ROLE`", Pool),
    ("`models[].pools.extra.NAME`", ExtraPool),
    ("`models[].pools.ROLE.shape`", Shape),
    ("`slo.CLASS`", SloClass),
    ("`tenants.TENANT`", Tenant),
    ("`transfer`", Transfer),
    ("`kv`", KvTiers),
    ("`registry`", RegistrySettings),
    ("`limits`", Limits),
    ("`hardware.GPU`", Hardware),
    ("`router`", RouterSettings),
)

_HEAD = f"""\
<!-- Made from cluster/spec/settings.py by `.venv/bin/python tools/cluster_file.py`; do not edit. -->

# The cluster file

One file, `baton.yaml`, describes a cluster: models and their pools, latency targets, tenants, hardware. The
same text is the `spec` of the [Kubernetes resource](kubernetes.md). Only `models` is needed, of a model only its name:

```yaml
models: [{{name: Qwen/Qwen3-0.6B}}]
```

- `baton lint FILE` finds what is wrong in it: unknown keys, wrong units, contradictions, promises that cannot be kept,
  with line, value and what to write instead.
- `baton explain FILE` says in words what it promises, which settings have their default, and why.
- `baton up FILE` starts it on this machine.

## How it is read

- YAML, at most {TEXT_CHARS_MAX >> 10} KiB, one document. Units are part of names: `_ms`, `_s`, `_bytes`, `_gib`, `_w`.
- Plain words are read as in YAML 1.2 and JSON: `true`, `false`, `null` and decimal numbers; all else is text: `no`,
  `0123456` and `12e4`, too.
- Anchors, aliases and `<<` may be used. Top-level keys that begin with `x-` are yours: a place for anchors.
- A key given twice, an unknown key and a tag (`!!…`) are errors.
- Paths in it are relative to the file, not to the working directory.
- Secrets do not belong into it: keys are kept as SHA-256 lines in files of their own (`baton key new TENANT`),
  passwords in files, tokens for vLLM (`HF_TOKEN`) in the environment of `baton up`, which the engines inherit.

## A file with everything

```yaml
{EXAMPLE}```

## Every setting
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(title, section) for title, section in SECTIONS)])


def _section(title: str, section: type) -> str:
    rows = "\n".join(_rows(section))
    summary = " ".join((section.__doc__ or "").partition("\n\n")[0].split())
    head = "| setting | takes | default, and why | what it is |\n| --- | --- | --- | --- |"
    return f"### {title}\n\n{summary}\n\n{head}\n{rows}\n"


def _rows(section: type) -> Iterator[str]:
    for name, setting in settings_of(section).items():
        said = setting.about
        coming = f" *Coming: {said.coming}.*" if said.coming else ""
        text = f"{said.text}{_choices(setting)}{coming}"
        yield f"| `{name}` | {_takes(setting)} | {_default(setting)} | {text} |"


def _default(setting: Setting) -> str:
    if setting.required:
        return setting.about.why
    value = shown_default(setting)
    return f"`{value}`: {setting.about.why}" if value else setting.about.why


def _takes(setting: Setting) -> str:
    """Type, unit and bounds of a setting: ``number of milliseconds, above 0``."""
    kind = _kind(setting.kind)
    unit = unit_of(setting.name)
    return ", ".join([f"{kind} of {unit}" if unit and unit != "hour" else kind, *_bounds(setting.about)])


def _bounds(said: About) -> Iterator[str]:
    least, most = said.at_least, said.at_most
    if least is not None and most is not None:
        yield f"{shown(least)} to {shown(most)}"
    elif least is not None:
        yield f"{shown(least)} or more"
    if said.above is not None:
        yield f"above {shown(said.above)}"
    if most is not None and least is None:
        yield f"{shown(most)} at most"


def _kind(kind: Any) -> str:
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Any: "anything"}
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return "list of sections" if is_section(inner) else f"list of {names[inner]}s"
    if get_origin(kind) is not None:
        inner = get_args(kind)[1]
        return "mapping of names to sections" if is_section(inner) else f"mapping of names to {names[inner]}"
    if is_section(kind):
        return "section"
    if issubclass(kind, StrEnum):
        return " or ".join(f"`{each.value}`" for each in kind)
    return names[kind]


def _choices(setting: Setting) -> str:
    """What each choice means, if the enum says it."""
    kind = setting.kind
    if not (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return ""
    return "".join(f" `{choice}`: {meaning}" for choice, meaning in MEANINGS[kind].items())
