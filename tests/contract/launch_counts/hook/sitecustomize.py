"""Counts what a process does: files, processes, threads, modules, messages, sleeps, page faults.

Python imports this module in every process whose PYTHONPATH names its folder. The forks of a zygote write their
counts, when they exit, into the folder that RANKZERO_COUNTS names.
"""

import json
import os
import resource
import socket
import sys
import threading
import time

counts = {}
ROLES = {"zygote": "agent", "agent": "rank"}
_EVENTS = {
    "os.fork": "forks",
    "subprocess.Popen": "processes",
    "import": "modules imported",
    "os.rename": "renames",
    "os.remove": "removed files",
    "os.link": "links",
    "os.mkdir": "directories",
}
# How often they are read depends on the clock; how many scratch directories are looked at, on other runs of the host.
_POLLED = ("/status.json", "/claim", "/cancel", "/events.jsonl", "/stat", "/status")
_exit = os._exit
_open = os.open


def _show(event, arguments):
    """For whoever looks for what a count consists of."""
    if event != "open" or "/show-" not in str(arguments[0]):
        with open(os.path.join(os.environ["RANKZERO_SHOW"], f"show-{role}-{os.getpid()}"), "a") as file:
            file.write(f"{event} {arguments[0]} {arguments[-1]}\n")


def _add(name, amount=1):
    counts[name] = counts.get(name, 0) + amount


def _role():
    with open("/proc/self/cmdline") as file:
        return "zygote" if "rankzero.task.zygote" in file.read() else "caller"


def _on_event(event, arguments):
    if os.environ.get("RANKZERO_SHOW") and event in ("open", "import", "os.rename"):
        _show(event, arguments)
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            # A file object for a descriptor opens nothing.
            return
        # The number of levels of a control group is the host's.
        if str(path).endswith(_POLLED) or "/rankzero-agent-" in str(path) or str(path).startswith("/sys/fs/cgroup/"):
            return
        _add("files opened to write" if flags & (os.O_WRONLY | os.O_RDWR) else "files opened to read")
    elif event in _EVENTS:
        _add(_EVENTS[event])


def _on_fork():
    global role
    role = ROLES.get(role, "caller")
    counts.clear()


def _before_fork():
    found = sys.modules.get("rankzero.channel.messages")
    if role == "zygote" and found and found._to_json.__name__ == "encode":
        # Messages of two ranks may leave their agent in one call or two. Here, since the pages of a fork are counted.
        _count_calls(found, "_to_json", "messages")


def _write_and_exit(code):
    if role in ("agent", "rank"):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        found = {**counts, "pages": faults}
        folder = os.environ.get("RANKZERO_COUNTS") or "/proc"
        try:
            with open(os.path.join(folder, f"{role}-{os.getpid()}.new"), "w") as file:
                json.dump(found, file)
            os.rename(file.name, file.name.removesuffix(".new") + ".json")
        except OSError:
            pass
    _exit(code)


def _count_calls(owner, function, name):
    real = getattr(owner, function)

    def counting(*args, **kwargs):
        _add(name)
        return real(*args, **kwargs)

    setattr(owner, function, counting)


def _count_sends(function, sizes):
    real = getattr(socket.socket, function)

    def counting(self, data, *args):
        # A zygote gets the environment, whose size is the machine's.
        if self.family != socket.AF_UNIX:
            if role != "agent":
                _add("messages")
            _add("bytes sent", sizes(data))
        return real(self, data, *args)

    setattr(socket.socket, function, counting)


role = _role()
os._exit = _write_and_exit
os.register_at_fork(before=_before_fork, after_in_child=_on_fork)
for _function in ("fsync", "fdatasync"):
    _count_calls(os, _function, "fsyncs")
_count_calls(time, "sleep", "sleeps")
_count_calls(threading, "_start_new_thread", "threads")
_count_sends("send", len)
_count_sends("sendall", len)
_count_sends("sendmsg", lambda parts: sum(map(len, parts)))
sys.addaudithook(_on_event)
