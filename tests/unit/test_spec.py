"""The cluster file as a whole: its fields, its defaults, its problems, and bounds on hostile text."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest

from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import (
    POLICY,
    CacheScope,
    Floor,
    Limits,
    Model,
    Parsed,
    Pool,
    RouterSettings,
    Severity,
    Shape,
    Spec,
    WhenMissed,
    check_outside,
    parse,
)
from cluster.spec.reader import PROBLEMS_MAX
from cluster.spec.tree import TEXT_CHARS_MAX, VALUES_MAX
from router.api.config import RouterConfig
from router.scheduler.scoring.policies import POLICIES
from router.scheduler.scoring.workload import workload

BARE = "models: [{name: org/model}]\n"


def spec_of(text: str) -> Spec:
    return parse(text, "baton.yaml").usable()


def told(text: str) -> list[str]:
    return [str(problem) for problem in parse(text, "baton.yaml").problems]


# -- reading --


def test_a_model_name_is_enough() -> None:
    spec = spec_of(BARE)
    (model,) = spec.models
    assert model == Model(name="org/model")
    assert {role: pool.at_start for role, pool in model.pools.named().items()} == {Role.PREFILL: 1, Role.DECODE: 1}
    assert spec == Spec(models=(model,))


def test_everything_is_read() -> None:
    spec = spec_of(
        """
models:
  - name: org/model
    pools:
      prefill: {min: 1, max: 8, shape: {tp: 2}, gpu: H100-SXM, engine_args: {seed: 7, a: {b: [1, 2.5, null]}}}
      decode: {env: {VLLM_USE_V1: 1, RATIO: 1.50, TRUE: true}}
slo: {chat: {ttft_ms: 500, attainment: 0.9, when_missed: shed}}
tenants: {acme: {share: 3, classes: [chat], cache_scope: shared}}
limits: {stall_s: 7}
"""
    )
    prefill, decode = spec.models[0].pools.prefill, spec.models[0].pools.decode
    assert prefill is not None
    assert decode is not None
    assert (prefill.min, prefill.at_start, prefill.at_most, prefill.shape) == (1, 1, 8, Shape(tp=2))
    assert prefill.engine_args == {"seed": 7, "a": {"b": [1, 2.5, None]}}
    assert decode.env == {"VLLM_USE_V1": "1", "RATIO": "1.50", "TRUE": "true"}
    assert spec.slo["chat"].when_missed is WhenMissed.SHED
    assert spec.tenants["acme"].cache_scope is CacheScope.SHARED
    assert spec.limits == Limits(stall_s=7.0)
    assert isinstance(spec.limits.stall_s, float)


@pytest.mark.parametrize(
    ("given", "at_start", "at_most"),
    [
        ({}, 1, 1),
        ({"min": 3}, 3, 3),
        ({"start": 3}, 3, 3),
        ({"max": 8}, 1, 8),
        ({"min": 0, "max": 4}, 0, 4),
        ({"min": 2, "start": 4, "max": 8}, 4, 8),
    ],
)
def test_the_defaults_of_a_pools_sizes(given: dict[str, int], at_start: int, at_most: int) -> None:
    pool = Pool(**given)
    assert (pool.at_start, pool.at_most) == (at_start, at_most)


def test_a_tenants_key_file_and_class_follow_from_its_name_and_list() -> None:
    spec = spec_of(
        BARE
        + """
slo: {chat: {ttft_ms: 500}, batch: {ttft_ms: 20000}}
tenants: {a: {}, b: {classes: [batch, chat]}, c: {classes: [batch, chat], default_class: chat, key_file: k}}
"""
    )
    assert [spec.key_file(name) for name in spec.tenants] == ["keys/a", "keys/b", "k"]
    assert [spec.default_class(name) for name in spec.tenants] == [None, "batch", "chat"]


def test_plain_words_are_read_as_in_json() -> None:
    args = "[no, on, 0123, 1_000, 1:30, 12e4, 2001-01-01, .inf, .nan, 0x10, 0, -7, +7, 1.5, .5, true, null, ~, '1']"
    pool = spec_of(f"models: [{{name: m, pools: {{both: {{engine_args: {{a: {args}}}}}}}}}]").models[0].pools.both
    assert pool is not None
    texts = ["no", "on", "0123", "1_000", "1:30", "12e4", "2001-01-01", ".inf", ".nan", "0x10"]
    assert pool.engine_args["a"] == [*texts, 0, -7, 7, 1.5, 0.5, True, None, None, "1"]


def test_fields_written_in_a_pool_win_over_merged_anchors() -> None:
    text = """
x-pool: &pool {start: 2, shape: &shape {tp: 2}, env: {A: a}}
x-more: &more {env: {B: b}, gpu: H200}
models:
  - name: m
    pools:
      prefill: {<<: *pool, start: 3}
      decode: {<<: [*pool, *more], shape: {<<: *shape, dp: 2}}
"""
    pools = spec_of(text).models[0].pools
    assert pools.prefill == Pool(start=3, shape=Shape(tp=2), env={"A": "a"})
    assert pools.decode == Pool(start=2, shape=Shape(tp=2, dp=2), env={"A": "a"}, gpu="H200")


def test_a_mistake_in_an_anchor_is_told_where_the_anchor_stands() -> None:
    text = "x-pool: &pool {start: many}\nmodels:\n  - name: m\n    pools: {both: *pool}\n"
    (problem,) = parse(text, "f").problems
    assert (problem.line, problem.column, problem.field) == (1, 23, "models[0].pools.both.start")


# -- problems --


def test_a_problem_prints_as_compilers_do() -> None:
    (line,) = told(BARE + "slo: {chat: {ttft_s: 0.5}}\n")
    assert line == (
        "baton.yaml:2:14: error: slo.chat.ttft_s: wrong unit, `ttft_ms` is in milliseconds (0.5) → write `ttft_ms: 500`"
    )


def test_problems_are_told_all_at_once_in_the_order_of_the_file() -> None:
    parsed = parse(BARE + "router: {port: -1, hots: a}\nlimits: {stall_s: x}\n", "f")
    assert [problem.field for problem in parsed.problems] == ["router.port", "router.hots", "limits.stall_s"]


def test_a_file_with_errors_has_no_spec_and_says_all_of_them() -> None:
    parsed = parse("models: []\nrouter: {port: -1}\n", "f.yaml")
    assert parsed.spec is None
    with pytest.raises(UsageError, match=r"(?s)f\.yaml:1:9: error: models.*f\.yaml:2:16: error: router\.port"):
        parsed.usable()


def test_warnings_leave_the_file_usable() -> None:
    parsed = parse(BARE + "router: {host: 0.0.0.0}\n", "f")
    assert [problem.severity for problem in parsed.problems] == [Severity.WARNING]
    assert parsed.errors == ()
    assert parsed.usable().router.host == "0.0.0.0"


def test_a_mistake_is_reported_once() -> None:
    """A wrong value is reported once; the rules that compare values do not report its consequences too."""
    assert len(told(BARE + "slo: {chat: {ttft_s: 0.5}}\n")) == 1
    assert len(told("models: [{name: m, pools: {both: {min: 4, max: two}}}]\n")) == 1
    assert len(told(BARE + "slo: {chat: 7}\ntenants: {a: {classes: [chat]}}\n")) == 1
    assert len(told("models: [{nam: org/model}]\n")) == 1


def test_a_problem_stays_on_one_line_whatever_the_value() -> None:
    (line,) = told(BARE + 'router: {policy: "a\\n\\e[2Jb"}\n')
    assert line.isprintable()
    (line,) = told(BARE + f"router: {{port: {'9' * 500}}}\n")
    assert len(line) < 300


def test_problems_as_json() -> None:
    (problem,) = parse(BARE + "limits: {stall_s: 0}\n", "f").problems
    assert problem.as_json() == {
        "file": "f",
        "line": 2,
        "column": 19,
        "severity": "error",
        "field": "limits.stall_s",
        "value": "0",
        "message": "must be above 0",
        "fix": "write a number that is above 0, or leave it out",
    }


# -- checks outside the text: files, policies, hardware --


def test_targets_below_the_hardwares_floor_are_reported_if_a_floor_is_known() -> None:
    text = BARE + "slo: {chat: {ttft_ms: 5, tpot_ms: 50}}\n"
    assert told(text) == []

    def floor_of(_: Spec, model: Model) -> Floor:
        return Floor(because=f"{model.name} reads 64 GB a step", targets={"ttft_ms": 40, "tpot_ms": 10})

    (problem,) = parse(text, "f", floor_of=floor_of).problems
    assert (problem.field, problem.value) == ("slo.chat.ttft_ms", "5")
    assert problem.message == "org/model cannot reach it: at best 40 ms (org/model reads 64 GB a step)"
    assert parse(text, "f", floor_of=lambda _, __: None).problems == ()


def outside(text: str, *files: str) -> Parsed:
    return check_outside(parse(text, "f"), exists=lambda path: path in files, policies=["workload", "round_robin"])


def test_missing_files_are_warnings() -> None:
    text = BARE + "tenants: {acme: {}, beta: {key_file: k}}\nregistry: {url: 'redis://r', ca_file: c}\n"
    parsed = outside(text.replace("redis:", "rediss:"), "k")
    assert [(problem.line, problem.field) for problem in parsed.problems] == [
        (2, "tenants.acme.key_file"),
        (3, "registry.ca_file"),
    ]
    assert "baton key new acme --file keys/acme" in parsed.problems[0].fix
    assert parsed.spec is not None


def test_missing_files_of_the_router_are_warnings() -> None:
    names = ["admin_key_file", "tls_cert_file", "tls_key_file"]
    text = BARE + "router: {admin_key_file: a, tls_cert_file: b, tls_key_file: c}\n"
    assert [problem.field for problem in outside(text).problems] == [f"router.{name}" for name in names]
    assert [problem.field for problem in outside(text, "a", "c").problems] == ["router.tls_cert_file"]
    assert outside(text).spec is not None


def test_a_policy_that_does_not_exist_is_an_error() -> None:
    parsed = outside(BARE + "router: {policy: round-robin}\n")
    assert parsed.spec is None
    assert parsed.problems[0].fix == "did you mean `round_robin`?"


def test_check_outside_adds_nothing_to_a_file_with_errors() -> None:
    parsed = parse("models: []\n", "f")
    assert check_outside(parsed, exists=lambda _: False, policies=[]) is parsed


def test_defaults_are_the_routers_own() -> None:
    config = {field.name: field.default for field in fields(RouterConfig)}
    for section in (Limits(), RouterSettings()):
        for field in fields(section):
            if field.name not in {"processes", "admin_key_file"}:  # the router gets the keys themselves
                assert getattr(section, field.name) == config[field.name], field.name
    assert POLICIES[POLICY] is workload, "where no policy is named"


@pytest.mark.parametrize("slo", ["", "slo: {fast: {ttft_ms: 500}}\n"], ids=["best effort", "promised"])
def test_promises_do_not_change_the_policy(slo: str) -> None:
    spec = spec_of(BARE + slo)
    assert spec.router.policy == RouterConfig(has_registry=True, classes=spec.slo).policy == POLICY


# -- bounds --


HOSTILE = {
    "many keys": "".join(f"key{number}: 1\n" for number in range(VALUES_MAX // 2 - 10)),
    "many unlike keys": "".join(f"{number:x}{'y' * (number % 7)}: 1\n" for number in range(9000)),
    "many wrong values": BARE + "limits:\n" + "".join(f"  stall_s{number}: x\n" for number in range(9000)),
    "many models": "models:\n" + "  - {name: a/b, pools: {both: {min: 4, max: 2}}}\n" * 1500,
    "many env": "models: [{name: m, pools: {both: {env: {" + "A-B: 1, " * 9000 + "}}}}]\n",
    "brackets": "[" * 50_000,
    "braces": "{a: " * 50_000,
    "dashes": "- " * 50_000,
    "questions": "? " * 50_000,
    "quotes": '"' * 50_001,
    "one long word": "a" * TEXT_CHARS_MAX,
    "too long": "a: 1\n" * TEXT_CHARS_MAX,
    "one long number": f"models: [{{name: m, pools: {{both: {{min: {'9' * 100_000}}}}}}}]",
    "aliases": "models: [&a [x], " + "*a, " * 60_000 + "]",
    "aliases in depth": "".join(f"x{n}: &x{n} [*x{n - 1}]\n" if n else "x0: &x0 [1]\n" for n in range(3000)),
    "escape": '"\\UFFFFFFFF"',
    "surrogate": 'models: [{name: "\\ud800"}]',
    "version": f"%YAML {'9' * 5000}.1\n--- a",
    "tags": "!!a " * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_rejected_within_seconds(name: str) -> None:
    began = time.process_time()
    parsed = parse(HOSTILE[name], "f")
    assert time.process_time() - began < 5
    assert 1 <= len(parsed.problems) <= PROBLEMS_MAX
    assert parsed.spec is None


def test_the_last_problem_says_that_there_are_more() -> None:
    parsed = parse(HOSTILE["many models"], "f")
    assert len(parsed.problems) == PROBLEMS_MAX
    assert parsed.problems[-1].message == "and more problems from here on"


@pytest.mark.parametrize(
    ("pools", "can"),
    [
        ("prefill: {}, extra: {decode-a: {role: decode}}", True),
        ("extra: {prefill-a: {role: prefill}, decode-a: {role: decode}}", True),
        ("both: {max: 1}, extra: {both-a: {role: both, max: 1}}", True),
        ("prefill: {}, extra: {prefill-a: {role: prefill}}", False),
        ("both: {max: 1}", False),
    ],
)
def test_extra_pools_count_for_whether_a_model_can_hand_over(pools: str, can: bool) -> None:
    (model,) = spec_of(f"models: [{{name: m, pools: {{{pools}}}}}]").models
    assert model.pools.can_hand_over() is can
