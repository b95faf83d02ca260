"""Hosts with names and addresses of their own, all of them on this machine.

Each is a network namespace with its own loopback, ports, hostname and
/etc/hosts, on a bridge that is in a namespace too: nothing outside sees them.
They share this machine's files and processors. Making them takes root.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile

_NETWORK = "10.123.0"
_PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
_START = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def missing():
    """Why there can be no hosts here, or None."""
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"there is no {program}"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Hosts(["probe"]) as hosts:
            subprocess.run(hosts.on("probe", "true"), check=True)
    except subprocess.CalledProcessError:
        return "this machine allows no network namespaces"
    return None


class Hosts:
    """Hosts that reach each other by name.

    Args:
        names: their names.
    """

    def __init__(self, names):
        self._names = list(names)
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            known = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            self._known = known.name
            print("127.0.0.1 localhost", file=known)
            switch = self._space("switch")
            self._add(stack, switch)
            _ip(f"-n {switch} link add bridge type bridge")
            _ip(f"-n {switch} link set bridge up")
            for i, name in enumerate(self._names, 1):
                space, address = self._space(name), f"{_NETWORK}.{i}"
                print(address, name, file=known)
                self._add(stack, space)
                _ip(
                    f"-n {space} link add eth0 type veth "
                    f"peer name port{i} netns {switch}"
                )
                _ip(f"-n {switch} link set port{i} master bridge up")
                _ip(f"-n {space} addr add {address}/24 dev eth0")
                _ip(f"-n {space} link set lo up")
                _ip(f"-n {space} link set eth0 up")
            known.flush()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def on(self, name, *command):
        """The command that runs a command on a host."""
        return [
            *("nsenter", f"--net=/run/netns/{self._space(name)}"),
            *("unshare", "--mount", "--uts", "sh", "-c", _START, "sh"),
            *(self._known, name, *map(str, command)),
        ]

    @staticmethod
    def _space(name):
        return f"test-{os.getpid()}-{name}"

    @staticmethod
    def _add(stack, space):
        _ip(f"netns add {space}")
        stack.callback(_ip, f"netns del {space}")


def _ip(arguments):
    subprocess.run(
        ["ip", *arguments.split()], check=True, stderr=subprocess.PIPE
    )
