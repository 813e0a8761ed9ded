"""Makes a Python of Linux one of macOS, as far as it goes: every process that has this folder on its path.

What macOS's Python has not got is taken away, and there is no /proc. What stays is Linux's kernel.
"""

import builtins
import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import sysconfig
import types

# It reads a file that is named after the platform.
sysconfig.get_config_vars()
sys.platform = "darwin"

_MISSING = {
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_OFD_SETLK", "F_OFD_SETLKW"),
    os: (
        *(
            "sched_getaffinity",
            "sched_setaffinity",
            "pidfd_open",
            "memfd_create",
            "copy_file_range",
            "eventfd",
            "pipe2",
        ),
        *("posix_fallocate", "posix_fadvise", "splice", "setns", "unshare", "getrandom", "O_TMPFILE", "O_DIRECT"),
        *("sendfile", "fdatasync", "P_PIDFD", "setresuid", "getresuid"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal", "sigwaitinfo", "sigtimedwait"),
    socket: ("SO_PEERCRED", "SO_BINDTODEVICE", "AF_NETLINK", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT"),
}
for _module, _names in _MISSING.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)

# urllib asks it for the system's proxies.
_scproxy = types.ModuleType("_scproxy")
_scproxy._get_proxy_settings = _scproxy._get_proxies = dict
sys.modules["_scproxy"] = _scproxy


def _without_proc(function, no):
    def checked(path, *args, **kwargs):
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(("/proc", "/sys/")):
            return no(path)
        return function(path, *args, **kwargs)

    return checked


def _refuse(path):
    raise FileNotFoundError(2, "No such file or directory", path)


for _name in ("stat", "lstat", "listdir", "scandir", "readlink", "open", "access"):
    setattr(os, _name, _without_proc(getattr(os, _name), _refuse))
builtins.open = _without_proc(builtins.open, _refuse)


class _NoLibc:
    """macOS's C library has no such call, as far as ours look for it."""

    def __init__(self, libc):
        self._libc = libc

    def __getattr__(self, name):
        if name in ("prctl", "pidfd_open", "unshare"):
            raise AttributeError(f"dlsym: {name}: symbol not found")
        return getattr(self._libc, name)


_load = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **kwargs: (
    _load(name, *args, **kwargs) if name is not None else _NoLibc(_load(None, *args, **kwargs))
)
