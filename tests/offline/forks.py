"""`python forks.py ADDRESS`: fork a process for each one that sitecustomize hands over, with the library imported.

At ADDRESS-packages, what the library builds on is imported alone.

The new process has the other's command line, environment, folder and standard files; signals and its end are passed on.
"""

import atexit
import json
import logging
import os
import resource
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress


def serve(address):
    """Fork for every caller until the tests are over; return in the new process, with what it was told.

    The caller's signals go to the child's group, its end to the caller; a child whose caller is gone ends."""
    addresses, parent, running = [address, f"{address}-packages"], os.getppid(), {}
    servers = [socket.socket(socket.AF_UNIX) for _ in addresses]
    for server, at in zip(servers, addresses):
        server.bind(at)
        server.listen(64)
    import packages  # noqa: F401 (callers wait)

    if own := os.fork():
        import preloaded  # noqa: F401
    address, server, parent = (addresses[0], servers[0], parent) if own else (addresses[1], servers[1], os.getppid())
    while os.getppid() == parent:
        callers = {caller: child for child, caller in running.values()}
        for ready in select.select([server, *running, *callers], [], [], 1)[0]:
            if ready is server:
                caller = server.accept()[0]
                files, told = socket.recv_fds(caller, 1, 3)[1], json.loads(caller.makefile().readline())
                if (child := os.fork()) == 0:
                    for i, file in enumerate(files):
                        os.dup2(file, i)
                    os.closerange(3, 1 << 16)
                    return told
                os.setpgid(child, child)
                running[os.pidfd_open(child)] = child, caller
                list(map(os.close, files))
            elif ready in callers:
                with suppress(OSError):  # it has ended
                    os.killpg(callers[ready], int.from_bytes(ready.recv(1)) or signal.SIGKILL)
            else:
                child, caller = running.pop(ready)
                with suppress(OSError):  # it was killed
                    caller.sendall(os.waitpid(child, 0)[1].to_bytes(4))
                caller.close()
                os.close(ready)
    for child, _ in running.values():
        os.killpg(child, signal.SIGKILL)
    os.remove(address)
    os._exit(0)


def go_on(words, path, environment, folder, largest):
    "Be the interpreter that was handed over, to its end"
    resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    module, code = words[0] == "-m", 0
    anew = [
        "c2lip.lab.training.launch",
        "c2lip.lab.attention.panel",
        "ipywidgets",
    ]  # widgets tell a kernel at their import
    for name in [name for name in sys.modules if name.partition(".")[0] == "papermill"] + anew:
        sys.modules.pop(name, None)  # what papermill loads at its start changes its command line
    logging.root.handlers.clear()
    sys.path[:] = [folder if module else os.path.dirname(words[0]), *path]
    sys.argv = words[:1] + words[2:] if words[0] == "-c" else words[module:]
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        elif module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as e:
        code = e.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a kernel has closed it
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    go_on(*serve(sys.argv[1]))
