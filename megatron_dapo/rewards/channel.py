"""Messages between the reward pool and its workers: length-prefixed pickles over a socket, every wait bounded."""

import pickle
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("<Q")


def send(sock: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Send one message. Raises TimeoutError past `deadline` (time.monotonic), OSError when the peer is gone."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    _limit(sock, deadline)
    sock.sendall(_HEADER.pack(len(payload)) + payload)


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """The next message. Raises TimeoutError past `deadline`, EOFError when the peer closed the socket or died."""
    (length,) = _HEADER.unpack(_exactly(sock, _HEADER.size, deadline))
    return pickle.loads(_exactly(sock, length, deadline))


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        _limit(sock, deadline)
        received = sock.recv_into(view[done:])
        if not received:
            raise EOFError("the other end closed the socket")
        done += received
    return data


def _limit(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        sock.settimeout(None)
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock.settimeout(remaining)
