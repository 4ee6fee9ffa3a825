"""Aliases, certificates and operators' keys of `baton router`: from flags, from the cluster file, or refused."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from baton.cli import main
from baton.commands import router
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.keys import digest, key_line
from cluster.spec import Limits, RouterSettings, Spec, parse
from cluster.spec.about import flag_of, settings_of
from router.api.config import RouterConfig

FILE = """
models:
  - {name: org/model, served_name: mine, aliases: [gpt-4o, other]}
router: {tls_cert_file: keys/cert.pem, tls_key_file: keys/key.pem, admin_key_file: keys/admin}
"""


def args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return parser.parse_args(words)


def spec() -> Spec:
    return parse(FILE, "baton.yaml").usable()


def test_aliases_of_the_file_and_of_flags() -> None:
    assert router._aliases(args(), None) == {}
    assert router._aliases(args(), spec()) == {"gpt-4o": "mine", "other": "mine"}
    flags = args("--alias", "gpt-4o=a/b", "--alias", "new=c=d")
    assert router._aliases(flags, spec()) == {"gpt-4o": "a/b", "other": "mine", "new": "c=d"}


@pytest.mark.parametrize("wrong", ["x", "=model", "name=", "="])
def test_a_malformed_alias_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="NAME=MODEL"):
        router._aliases(args("--alias", wrong), None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_no_setting_takes_a_number_that_is_not_finite(wrong: float) -> None:
    instance = Instance(id=InstanceId("both-0"), role=Role.BOTH, url="http://127.0.0.1:1")
    bounded = 0
    for section in (Limits, RouterSettings):
        for name, setting in settings_of(section).items():
            if setting.kind is float and hasattr(RouterConfig, name):
                bounded += 1
                with pytest.raises(UsageError, match=f"{flag_of(name)} is {wrong}: it must be a finite number"):
                    RouterConfig(instances=(instance,), **{name: wrong})
    assert bounded
    assert RouterConfig(instances=(instance,), body_bytes_max=10**12).body_bytes_max == 10**12


def test_files_are_beside_the_cluster_file_unless_flags_name_others(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "admin").write_text(key_line("sk-operator"))
    config = str(tmp_path / "baton.yaml")
    found = router._files(args("--config", config, "--tls-key-file", "given.pem"), spec())
    assert found["tls_cert_file"] == str(tmp_path / "keys" / "cert.pem")
    assert found["tls_key_file"] == "given.pem"
    assert found["admin_keys"]() == (digest("sk-operator"),)
    nothing = router._files(args(), None)
    assert nothing == {"tls_cert_file": None, "tls_key_file": None, "admin_keys": None}


def test_a_missing_file_of_operators_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--admin-key-file: no file .*gone; `baton key new"):
        router._files(args("--admin-key-file", str(tmp_path / "gone")), None)


def test_operators_keys_of_several_files_are_all_taken(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    for name in ("one", "two", "keys/admin"):
        (tmp_path / name).write_text(key_line(f"sk-{name}"))
    words = [word for name in ("one", "two") for word in ("--admin-key-file", str(tmp_path / name))]
    found = router._files(args("--config", str(tmp_path / "baton.yaml"), *words), spec())
    assert found["admin_keys"]() == (digest("sk-one"), digest("sk-two")), "flags win over the file"
    (tmp_path / "two").write_text(key_line("sk-other-of-two"))
    assert found["admin_keys"]() == (digest("sk-one"), digest("sk-other-of-two")), "each is read again"


def test_a_key_without_a_certificate_is_refused() -> None:
    only = (Instance(id=InstanceId("x"), role=Role.BOTH, url="http://127.0.0.1:9"),)
    with pytest.raises(UsageError, match="--tls-key-file without --tls-cert-file"):
        RouterConfig(instances=only, tls_key_file="key.pem")


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("url", ["http://x:99999", "http://x:0", "http://x:-1", "http://x:http", "n=http://x:65536/v1"])
def test_a_port_that_cannot_be_one_is_refused(role: str, url: str) -> None:
    with pytest.raises(
        UsageError, match=rf"--{role}-url {url}: the port is not a number from 1 to 65535; write http://HOST:PORT"
    ):
        router.instances(args(f"--{role}-url", url))


@pytest.mark.parametrize("url", ["http://h:8000/v1", "http://h:8000/a/v1/", "http://h:8000?x=1", "http://h:8000#x"])
def test_a_url_with_the_apis_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"the router adds the APIs' paths itself; write http://HOST:PORT, without"):
        router.instances(args("--prefill-url", url))
    assert router.instances(args("--prefill-url", "http://h:8000/gateway/one"))[0].url.endswith("/gateway/one")


def test_urls_alone_are_engines_that_run_both_legs() -> None:
    found = router.instances(args("http://a:1", "mine=http://b:1", "--decode-url", "http://c:1"))
    assert [(each.id, each.role) for each in found] == [
        ("decode-0", Role.DECODE), ("both-0", Role.BOTH), ("mine", Role.BOTH)
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"^x: not a URL"):
        router.instances(args("x"))


def test_engines_by_url_are_reserved_as_the_files_model_is() -> None:
    named = tuple(router.instances(args("http://a:1")))
    mine, others = "{name: m, tenants: [acme]}", "{name: n}"

    def file(*models: str) -> Spec:
        text = f"models: [{', '.join(models)}]\ntenants: {{acme: {{key_file: k}}, other: {{key_file: o}}}}\n"
        return parse(text, "baton.yaml").usable()

    assert [each.tenants for each in router.reserved(named, file(mine))] == [{"acme"}]
    assert router.reserved(named, file(others)) == named
    with pytest.raises(UsageError, match=r"models\[1\].tenants: engines given by URL do not announce"):
        router.reserved(named, file(others, mine))


def test_half_a_bracket_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--decode-url", "http://[::1"]) == 2
    assert "--decode-url http://[::1: not a URL; write http://HOST:PORT" in capsys.readouterr().err


def test_a_port_out_of_range_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--decode-url", "http://x:99999"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "--decode-url http://x:99999" in told[0]


def test_ranks_may_share_one_url_and_nothing_else_is_given_twice() -> None:
    url = "http://10.0.0.1:8000"
    found = router.instances(args("--prefill-url", f"p@0={url}", "--prefill-url", f"p@1={url}"))
    assert [(each.id, each.url, each.rank) for each in found] == [("p@0", url, 0), ("p@1", url, 1)]
    for one, other in (("p@0", "p@0"), ("p@0", "q@1"), ("p", "p@1"), ("p", "q")):
        with pytest.raises(UsageError, match="given twice"):
            router.instances(args("--prefill-url", f"{one}={url}", "--decode-url", f"{other}={url}"))
