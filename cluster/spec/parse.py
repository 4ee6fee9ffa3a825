"""Turns a cluster file's text into a `Spec`, or into a list of all its problems. Pure: the caller reads the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from cluster.errors import UsageError
from cluster.spec.problems import FieldPath, Finding, Problem, Severity, nearest, quoted
from cluster.spec.reader import FilePlace, Reader, sorted_problems
from cluster.spec.rules import FloorOf, check
from cluster.spec.settings import Spec
from cluster.spec.tree import Malformed, Node, compose, tree_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a file says, and what is wrong with it."""

    file: str
    spec: Spec | None
    """None if the file has an error."""
    problems: tuple[Problem, ...]
    places: dict[FieldPath, FilePlace]
    """Where each value of the file stands. A setting that is missing here was left at its default."""
    text: str = ""
    """The file's text; empty if the file is a value (`parse_value`)."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems without the warnings."""
        return tuple(each for each in self.problems if each.severity is Severity.ERROR)

    def usable(self) -> Spec:
        """The cluster.

        Raises:
            UsageError: the file has errors; the message has a line for each.
        """
        if self.spec is None:
            raise UsageError("\n".join(["the cluster file cannot be used:", *(f"  {each}" for each in self.errors)]))
        return self.spec


def parse(text: str, file: str, *, floor_of: FloorOf | None = None) -> Parsed:
    """Read the text of a cluster file. `file` is its name in problems; `floor_of` gives the best times that hardware
    can reach.

    Never raises, whatever the text; takes at most a few seconds, whatever its length.
    """
    return replace(_read(Reader(file), lambda: compose(text), floor_of), text=text)


def parse_value(value: object, file: str, *, floor_of: FloorOf | None = None) -> Parsed:
    """Read a cluster file that is a value: the `spec` of a Kubernetes resource. As `parse`, without positions."""
    return _read(Reader(file), lambda: tree_of(value), floor_of)


def _read(reader: Reader, tree: Callable[[], Node | None], floor_of: FloorOf | None) -> Parsed:
    try:
        spec = reader.read(tree())
    except Malformed as fault:
        reader.places[()] = FilePlace(fault.mark, "")
        reader.tell((), fault.message, fault.fix)
        spec = None
    if spec is not None and not reader.full:
        for finding in check(spec, floor_of):
            _tell(reader, finding)
    return _parsed(reader.file, spec, reader.problems, reader.places)


def _tell(reader: Reader, finding: Finding) -> None:
    if finding.if_written and finding.path not in reader.places:
        return
    if not any(reader.is_broken(path) for path in (finding.path, *finding.uses)):
        reader.tell(finding.path, finding.message, finding.fix, severity=finding.severity, value=finding.value)


def _parsed(file: str, spec: Spec | None, problems: list[Problem], places: dict[FieldPath, FilePlace]) -> Parsed:
    told = sorted_problems(problems)
    failed = any(each.severity is Severity.ERROR for each in told)
    return Parsed(file=file, spec=None if failed else spec, problems=told, places=places)


def check_outside(
    parsed: Parsed,
    *,
    exists: Callable[[str], bool],
    fault: Callable[[str, str], str | None] = lambda _name, _file: None,
    policies: Collection[str],
    beside: Callable[[str], str] = str,
) -> Parsed:
    """Add the problems that only the machine that reads the file can find: unfit or missing files, unknown policies.

    `beside` turns a path as the file names it, relative to itself, into a path for `exists`. `fault` says
    what is wrong with a file that exists, by the setting's name. A missing or unfit file is a warning: where the
    cluster runs, it may be another one.
    """
    spec = parsed.spec
    if spec is None:
        return parsed
    reader = Reader(parsed.file)
    reader.places = parsed.places
    reader.problems = list(parsed.problems)
    for name in spec.tenants:
        file = beside(spec.key_file(name))
        if not exists(file):
            fix = f"`baton key new {name} --file {file}` makes one"
            reader.tell(("tenants", name, "key_file"), f"no file {file} here", fix, severity=Severity.WARNING)
        elif found := fault("key_file", file):
            fix = f"`baton key new {name} --file FILE` writes such a file"
            reader.tell(("tenants", name, "key_file"), f"{file}: {found}", fix, severity=Severity.WARNING)
    for path, said in _files(spec):
        if not exists(file := beside(said)):
            fix = "write its path, relative to the cluster file"
            reader.tell(path, f"no file {file} here", fix, severity=Severity.WARNING)
        elif found := fault(path[-1], file):
            fix = "give a file that the cluster can be started with"
            reader.tell(path, f"{file}: {found}", fix, severity=Severity.WARNING)
    if spec.router.policy not in policies:
        near = nearest(spec.router.policy, policies)
        fix = f"did you mean `{near}`?" if near else f"write one of {quoted(sorted(policies))}"
        reader.tell(("router", "policy"), "no such policy", fix)
    return replace(_parsed(parsed.file, spec, reader.problems, parsed.places), text=parsed.text)


def _files(spec: Spec) -> Iterator[tuple[tuple[str, str], str]]:
    """The files that the registry and the router are given, where the file names them."""
    for name in ("password_file", "ca_file"):
        if (said := getattr(spec.registry, name)) is not None:
            yield ("registry", name), said
    for name in ("admin_key_file", "tls_cert_file", "tls_key_file"):
        if (said := getattr(spec.router, name)) is not None:
            yield ("router", name), said
