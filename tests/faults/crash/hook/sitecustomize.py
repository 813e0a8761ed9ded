"""Numbers each operation on files and sockets of a process, and kills the process at one of them.

Python imports this module in every process whose PYTHONPATH names its folder. It does nothing unless `plan.json` lies
beside it, which says what to do: ``{"record": "/path/of/a/list"}``, or ``{"point": NAME, "what": "before"}`` (or
``"after"``) to kill the process there. Any other word has the S3 server of the tests answer that request so.

A point is named ``role operation path#count``: by what the process is, by the path below the folder of the bench
without its random parts, and by how often the process has done that. So a name means the same in each execution.
"""

import builtins
import io
import json
import os
import re
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BENCH = os.path.dirname(HERE)
_RANDOM = re.compile(r"[0-9a-f]{8,}|(?<=[-./])[a-z0-9_]{8}(?![a-z0-9_])|\d{3,}")
_ROLES = (
    ("/rankzero/worker/", "rank"),
    ("/rankzero/train/", "rank"),
    ("/rankzero/agent/", "agent"),
    ("/rankzero/task/zygote.py", "zygote"),
)
_real = {"open": io.open, "os.open": os.open, "write": os.write, "kill": os.kill, "close": os.close}


class _Process:
    """What this process has done so far."""

    def __init__(self):
        self.counts = {}
        self.role = None
        try:
            with _real["open"](os.path.join(HERE, "plan.json")) as file:
                self.plan = json.load(file)
        except (OSError, ValueError):
            self.plan = None


_process = None


def _forget():
    global _process
    _process = None


os.register_at_fork(after_in_child=_forget)


def _role():
    if "--submission" in sys.argv:
        return "driver"
    frame = sys._getframe(1)
    while frame is not None:
        for part, role in _ROLES:
            if part in frame.f_code.co_filename:
                return role
        frame = frame.f_back
    return sys.argv[1] if sys.argv[0].endswith("program.py") else "python"


def _name(operation, path):
    """The name of the next point; None for what is not watched."""
    global _process
    if _process is None:
        _process = _Process()
    if not _process.plan:
        return None
    if isinstance(path, int):
        try:
            path = os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return None
    path = os.path.abspath(os.fsdecode(path)) if path else ""
    if path and (not path.startswith(BENCH + "/") or path.startswith(HERE)):
        return None
    _process.role = _process.role or _role()
    rank = os.environ.get("RANK", "") if _process.role == "rank" else ""
    short = _RANDOM.sub("*", path[len(BENCH) + 1 :])
    return _counted(f"{_process.role}{rank} {operation} {short}")


def _changes(path):
    """Returns False if an open makes and truncates nothing: that leaves everything as it is."""
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return True


def _counted(text):
    _process.counts[text] = count = _process.counts.get(text, 0) + 1
    return f"{text}#{count}"


def _at(name, when):
    if name is None:
        return
    plan = _process.plan
    if "record" in plan:
        # An operation that fails leaves everything as it was, and is no point.
        if when == "after":
            handle = _real["os.open"](plan["record"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            _real["write"](handle, name.encode() + b"\n")
            _real["close"](handle)
    elif plan["point"] == name and plan["what"] == when and _is_first():
        _real["kill"](os.getpid(), signal.SIGKILL)
        signal.pause()


def _is_first():
    """Returns True once: the same point comes again in the next attempt."""
    try:
        _real["close"](_real["os.open"](os.path.join(HERE, "reached"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _header(name):
    """Returns the header by which the S3 server answers a request wrongly; empty for most."""
    plan = _process.plan or {}
    if name is None or plan.get("point") != name or plan["what"] in ("before", "after") or not _is_first():
        return b""
    return b"X-Fault: " + plan["what"].encode() + b"\r\n"


def _watch(module, function, operation, argument=0):
    real = getattr(module, function)

    def watched(*args, **kwargs):
        name = _name(operation, args[argument]) if len(args) > argument else None
        _at(name, "before")
        result = real(*args, **kwargs)
        _at(name, "after")
        return result

    setattr(module, function, watched)


for _function, _operation, _argument in (
    ("write", "write", 0),
    ("pwrite", "write", 0),
    ("writev", "write", 0),
    ("ftruncate", "truncate", 0),
    ("truncate", "truncate", 0),
    ("fsync", "fsync", 0),
    ("fdatasync", "fsync", 0),
    ("rename", "rename", 1),
    ("replace", "rename", 1),
    ("link", "link", 1),
    ("symlink", "link", 1),
    ("unlink", "unlink", 0),
    ("remove", "unlink", 0),
    ("mkdir", "mkdir", 0),
    ("rmdir", "rmdir", 0),
):
    _watch(os, _function, _operation, _argument)


def _os_open(path, flags, *args, **kwargs):
    name = _name("create", path) if flags & os.O_CREAT and "dir_fd" not in kwargs and _changes(path) else None
    _at(name, "before")
    result = _real["os.open"](path, flags, *args, **kwargs)
    _at(name, "after")
    return result


os.open = _os_open


class _File(io.FileIO):
    def write(self, data):
        name = _name("write", self.fileno())
        _at(name, "before")
        result = super().write(data)
        _at(name, "after")
        return result


def _open(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
    if not set(mode) & set("wax+") or buffering == 0:
        return _real["open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
    name = _name("create", file) if not isinstance(file, int) and _changes(file) else None
    _at(name, "before")
    raw = _File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    _at(name, "after")
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
    text.mode = mode
    return text


io.open = builtins.open = _open

_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) (\S+) HTTP")


def _watch_socket(function):
    real = getattr(socket.socket, function)

    def watched(self, data, *args):
        name = None
        if _process is None or _process.plan:
            first = data if isinstance(data, (bytes, bytearray, memoryview)) else next(iter(data), b"")
            if len(first) == 1:
                # An event loop wakes itself.
                return real(self, data, *args)
            request = _REQUEST.match(bytes(first[:500]))
            what = _RANDOM.sub("*", (request[1] + b" " + request[2]).decode()) if request else self.family.name
            name = _name(f"send {what}", "")
        _at(name, "before")
        if header := _header(name):
            line, end, rest = bytes(data).partition(b"\r\n")
            # The caller counts its own bytes.
            result = max(real(self, line + end + header + rest, *args) - len(header), 0)
        else:
            result = real(self, data, *args)
        _at(name, "after")
        return result

    setattr(socket.socket, function, watched)


for _function in ("send", "sendall", "sendmsg"):
    _watch_socket(_function)
