"""TLS for the clients' port, and the kernel's limit for clients that take no bytes. A shell: files and sockets."""

from __future__ import annotations

import socket
import ssl
from collections.abc import MutableMapping
from typing import Final

from cluster.errors import UsageError

HANDSHAKES: Final = ("begun", "done", "not_tls", "nothing_in_common", "alert", "other")
"""How handshakes are counted: each as begun, and once as something else unless its connection ends before. `alert`: the
client refused, mostly as it does not trust the certificate, and said so."""

_NOT_TLS: Final = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER"})
_NOTHING_IN_COMMON: Final = ("NO_SHARED_", "NO_SUITABLE_", "UNSUPPORTED_", "VERSION_TOO_LOW")


def server_context(cert_file: str, key_file: str | None, handshakes: MutableMapping[str, int]) -> ssl.SSLContext:
    """TLS 1.2 and newer, with a certificate chain and its key (PEM). Read once: a new certificate needs a new start.
    `handshakes`: where handshakes are counted, by `HANDSHAKES`.

    Raises:
        UsageError: a file cannot be read, or the two do not belong together. The message names the flags.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files = f"--tls-cert-file {cert_file}" + (f" --tls-key-file {key_file}" if key_file is not None else "")
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except ssl.SSLError as error:
        said = error.reason or str(error)
        raise UsageError(f"{files}: no certificate with its key, both PEM, the key unencrypted ({said})") from None
    except OSError as error:
        raise UsageError(f"{files}: {(error.strerror or str(error)).lower()}") from None
    handshakes.update(dict.fromkeys(HANDSHAKES, 0))
    context.sslobject_class = _counting(handshakes)
    return context


def _counting(handshakes: MutableMapping[str, int]) -> type[ssl.SSLObject]:
    """The class of a context's connections. An event loop tells nobody of a handshake that fails."""

    class Counted(ssl.SSLObject):
        begun = False

        def do_handshake(self) -> None:
            """Called again for each piece that arrives, until the handshake ends."""
            if not self.begun:
                self.begun = True
                handshakes["begun"] += 1
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                handshakes[_failure(error.reason or "")] += 1
                raise
            handshakes["done"] += 1

    return Counted


def _failure(reason: str) -> str:
    """OpenSSL's name of a failure as one of `HANDSHAKES`."""
    if reason in _NOT_TLS:
        return "not_tls"
    if "_ALERT_" in reason:
        return "alert"
    return "nothing_in_common" if reason.startswith(_NOTHING_IN_COMMON) else "other"


def _no_password() -> str:
    """Without this, OpenSSL would ask the terminal for a password."""
    return ""


def limit_untaken(listening: socket.socket, limit_s: float) -> None:
    """Make the kernel cut off connections whose client takes no sent bytes for `limit_s` seconds.

    Accepted sockets inherit it (tcp(7), ``TCP_USER_TIMEOUT``: sent and not acknowledged, or kept back because the
    client's window is closed). Without that option, only keep-alive probes and the stream's end detect such clients.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        listening.setsockopt(socket.IPPROTO_TCP, option, max(1, round(limit_s * 1000)))
