"""``python ARGUMENTS``, run by a fork of the server: same files, folder, environment and exit status, and nothing to import.

Stands in a folder of its own under the names ``python`` and ``kvlens``; the environment says where the server listens.
"""

import json
import os
import signal
import socket
import sys

MOST_FILES = 253
"""Linux hands on no more open files in one message."""


def main() -> None:
    server, own = socket.socket(socket.AF_UNIX), os.path.abspath(sys.argv[0])
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in numbers if number != server.fileno() and os.path.exists(f"/proc/self/fd/{number}")]
    assert len(files) <= MOST_FILES, files
    arguments = [*(["-m", "kvlens"] if os.path.basename(own) == "kvlens" else []), *sys.argv[1:]]
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "files": files, "client": own}
    text = json.dumps(request).encode()
    server.connect(os.environ["KVLENS_WARM_PYTHON"])
    socket.send_fds(server, [len(text).to_bytes(8, "big")], files)
    server.sendall(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is done about it is for the fork to say
    answer = server.recv(8)
    if not answer:
        sys.exit("the server of warm Pythons is gone")
    status = int.from_bytes(answer, "big", signed=True)
    if status < 0:  # killed by a signal: so is this one
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
