"""Ranks that meet at MASTER_ADDR: sums of one number, made on rank 0. Who waits for a rank that has died waits for ever,
as with NCCL: of several that fail at one moment, which one a keeper sees first is chance.
"""

import contextlib
import os
import signal
import socket
import struct
import time

_NUMBER = struct.Struct("d")
_peers: list = []  # of rank 0 its others, by rank; of another one rank 0


def get_rank():
    return int(os.environ["RANK"])


def get_world_size():
    return int(os.environ["WORLD_SIZE"])


def init_process_group(backend):
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if get_rank() > 0:
        _peers.append(_reached(place))
        _send(_peers[0], get_rank())
        return
    with socket.create_server(place, reuse_port=False) as server:
        came = [server.accept()[0] for _ in range(get_world_size() - 1)]
    _peers.extend(sorted(came, key=_receive))


def all_reduce(tensor):
    if get_rank() > 0:
        _send(_peers[0], tensor.item())
        tensor.fill_(_receive(_peers[0]))
        return
    tensor.fill_(tensor.item() + sum(_receive(peer) for peer in _peers))
    for peer in _peers:
        _send(peer, tensor.item())


def barrier():
    from . import zeros

    all_reduce(zeros(1))


def _reached(place):
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:  # rank 0 begins later
            time.sleep(0.05)


def _send(peer, number):
    with contextlib.suppress(OSError):  # it has died: its answer is waited for
        peer.sendall(_NUMBER.pack(number))


def _receive(peer):
    found = b""
    with contextlib.suppress(ConnectionResetError):
        found = peer.recv(_NUMBER.size, socket.MSG_WAITALL)
    while len(found) < _NUMBER.size:
        signal.pause()
    return _NUMBER.unpack(found)[0]
