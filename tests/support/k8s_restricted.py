"""The profile "restricted" for pods, rule by rule, after the page "Pod Security Standards" (kubernetes.io).

It is written from the page, independently of the code that makes the pods. It includes every rule of "baseline".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def broken(pod: Json) -> set[str]:
    """The rules that a pod or a pod template (`metadata`, `spec`) breaks."""
    return {*_of_pod(pod), *(rule for each in containers(pod["spec"]) for rule in _of_container(each, pod["spec"]))}


def containers(spec: Json) -> list[Json]:
    return [each for kind in ("initContainers", "containers", "ephemeralContainers") for each in spec.get(kind, ())]


def _of_pod(pod: Json) -> Iterator[str]:
    spec = pod["spec"]
    security = spec.get("securityContext", {})
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    kinds = [{*each} - {"name"} for each in spec.get("volumes", ())]
    if any(each == {"hostPath"} for each in kinds):
        yield "hostPath volumes"
    if any(not each <= VOLUMES for each in kinds):
        yield "volume types"
    if any(each["name"] not in SYSCTLS for each in security.get("sysctls", ())):
        yield "sysctls"
    old = [value for key, value in pod.get("metadata", {}).get("annotations", {}).items() if "apparmor" in key]
    if any(value != "runtime/default" and not value.startswith("localhost/") for value in old):
        yield "AppArmor"
    yield from _of_both(security)


def _of_both(security: Json) -> Iterator[str]:
    """Rules for fields that both pods and containers have."""
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield "HostProcess"
    if security.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "AppArmor"
    linux = security.get("seLinuxOptions", {})
    if linux.get("type", "") not in SELINUX or linux.get("user") or linux.get("role"):
        yield "SELinux"
    if security.get("runAsUser") == 0:
        yield "running as non-root user"
    if security.get("runAsNonRoot") is False:
        yield "running as non-root"
    if security.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccomp"


def _of_container(container: Json, spec: Json) -> Iterator[str]:
    security, of_pod = container.get("securityContext", {}), spec.get("securityContext", {})
    yield from _of_both(security)
    if security.get("privileged"):
        yield "privileged containers"
    if {*security.get("capabilities", {}).get("add", ())} - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if "ALL" not in security.get("capabilities", {}).get("drop", ()):
        yield "capabilities dropped"
    if any(each.get("hostPort") for each in container.get("ports", ())):
        yield "host ports"
    if security.get("procMount", "Default") != "Default":
        yield "/proc mount type"
    handlers = [container.get(each, {}) for each in PROBES] + [*container.get("lifecycle", {}).values()]
    if any(each.get(kind, {}).get("host") for each in handlers for kind in ("httpGet", "tcpSocket")):
        yield "host probes and lifecycle hooks"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation"
    if not security.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield "running as non-root"
    kind = security.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type")
    if kind not in {"RuntimeDefault", "Localhost"}:
        yield "seccomp"
