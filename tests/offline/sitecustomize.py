"""Python imports this at its start when its folder is on PYTHONPATH: in the tests and in every process they start.

A connection to another machine is refused, and noted in the file named by C2LIP_REFUSED, since a library may swallow
the error and go on. Loopback and Unix sockets pass: kernels talk over them.
"""

import gc
import os
import socket
import sys

gc.set_threshold(2_000_000, 20, 20)  # collections take a tenth of what it costs to import the library, fifty times

_connect, _connect_ex, _getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo


def _refuse(host):
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost", "0.0.0.0", "::", "::1", socket.gethostname()) or host.startswith("127."):
        return
    if os.environ.get("C2LIP_REFUSED"):
        with open(os.environ["C2LIP_REFUSED"], "a", encoding="utf8") as f:
            f.write(f"{host}\n")
    raise socket.gaierror(socket.EAI_NONAME, f"the tests are offline, {host} was asked for")


def _guard(method):
    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse(address[0])
        return method(self, address)

    return guarded


def _lookup(host, *args, **kwargs):
    _refuse(host)
    return _getaddrinfo(host, *args, **kwargs)


socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo = _guard(_connect), _guard(_connect_ex), _lookup


def _hand_over(address, words):
    "Go on in a fork of a process that has imported the library (forks.py), and end as it ends"
    import json
    import resource
    import signal

    there = socket.socket(socket.AF_UNIX)
    there.connect(address)
    socket.send_fds(there, [b"."], [0, 1, 2])
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    there.sendall(json.dumps([words, sys.path, dict(os.environ), os.getcwd(), largest]).encode() + b"\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: there.send(bytes([number])))
    code = os.waitstatus_to_exitcode(int.from_bytes(there.recv(4) or b"\1\0"))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


_FORKED = (
    "papermill nbdev-test shown c2lip ipykernel_launcher torch.distributed.run c2lip.lab.training.run rank broken_run"
)
_words = [word for word in sys.orig_argv[1:] if word != "-u"]
_main = _words[1] if _words[:1] == ["-m"] else os.path.basename("".join(_words[:1]))
_worker = _words == ["-c", "import sys;exec(eval(sys.stdin.readline()))"]  # of pytest-xdist
_address = os.environ.get("C2LIP_FORKS", "")
if _address and (_main in _FORKED.split() or _worker or _words[:1] == ["-c"] and _address.endswith("-packages")):
    _hand_over(_address, _words)
