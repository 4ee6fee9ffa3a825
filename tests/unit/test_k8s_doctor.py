"""What `baton k8s doctor` asks of an API server and of the operator's Role."""

from __future__ import annotations

from typing import Any, cast

from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.inspect import Inspection, checks

Json = dict[str, Any]


class Server:
    """An API server that knows HTTPRoutes and no other optional kind, and allows everything but listing HTTPRoutes."""

    async def request(self, _method: str, path: str, **words: Any) -> Json:
        if path.endswith("selfsubjectaccessreviews"):
            asked = words["body"]["spec"]["resourceAttributes"]
            return {"status": {"allowed": (asked["resource"], asked["verb"]) != ("httproutes", "list")}}
        if path == "/version":
            return {"gitVersion": "v1.37.0"}
        raise ApiFailed(404, "NotFound", path)

    async def kinds(self, groups: list[str]) -> frozenset[str]:
        if groups == ["monitoring.coreos.com/v1"]:
            raise ApiFailed(503, "ServiceUnavailable", "not now")
        return frozenset({"HTTPRoute"} if groups == ["gateway.networking.k8s.io/v1"] else ())


async def test_rights_on_kinds_of_other_operators_are_checked_where_the_server_knows_them() -> None:
    found = {each.what: each async for each in checks(cast("ApiClient", Server()), "llm")}
    assert found["HTTPRoute"].good
    routes = found["may use httproutes"]
    assert (routes.good, routes.optional) == (False, True), "only clusters that ask for a route need this right"
    assert routes.detail == "may not list: apply k8s/manifests/operator.yaml"
    assert found["PodMonitor"] == Inspection("PodMonitor", False, "503 ServiceUnavailable: not now", optional=True)
    assert "may use podmonitors" not in found
    assert found["may use deployments"].good


async def test_a_kind_of_another_operator_need_not_be_installed() -> None:
    class Bare(Server):
        async def kinds(self, groups: list[str]) -> frozenset[str]:
            return frozenset()

    found = {each.what: each async for each in checks(cast("ApiClient", Bare()), "llm")}
    for kind, right in (("HTTPRoute", "may use httproutes"), ("PodMonitor", "may use podmonitors")):
        assert (found[kind].good, found[kind].optional) == (False, True)
        assert "not installed" in found[kind].detail
        assert right not in found
