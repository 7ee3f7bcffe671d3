"""Free TCP ports of 127.0.0.1."""

import random
import socket

LOOPBACK = "127.0.0.1"

# Below the ports that systems give to outgoing connections: there a client that keeps trying a stopped
# server's port may be given that very port, connect to itself and keep the server from coming back.
_PORTS = range(20_000, 32_000)
_TRIES = 200


def free_port() -> int:
    """Return a port that nobody listens on, chosen at random.

    Raises:
        OSError: none of many tried ports is free.
    """
    for port in random.sample(_PORTS, _TRIES):
        if is_free(port):
            return port
    raise OSError(f"no free TCP port among {_TRIES} tried from {_PORTS.start} to {_PORTS.stop - 1}")


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: ended connections are no obstacle
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError:
            return False
    return True
