"""Two trackers to copy: `Webhook` posts to a chat, `StatsD` sends numbers by UDP.

Give them to a launcher, an operator or a resource: ``trackers=[Webhook("https://hooks.example.com/T1/B2")]``.
"""

import json
import math
import re
import socket
import time
import urllib.request

from rankzero.tracking import Tracker

PROGRESS = ("entered", "metric", "checkpoint", "restart", "returned")


class Webhook(Tracker):
    """Posts a text, as Slack and Teams take it, when a run makes no progress, is restarted or fails."""

    def __init__(self, url, no_progress=1800):
        self.url = url
        self.no_progress = no_progress

    def begin(self, run):
        self.pending, self.last, self.is_warned = [], time.monotonic(), False

    def add(self, run, events):
        for event in events:
            if event["type"] in PROGRESS:
                self.last, self.is_warned = time.monotonic(), False
            if event["type"] == "restart":
                self.pending.append(f"run {run.id} is restarted: {event['what']}")
        silent = time.monotonic() - self.last
        if silent > self.no_progress and not self.is_warned:
            self.is_warned = True
            self.pending.append(f"run {run.id} makes no progress: its ranks reported nothing for {silent:.0f} s")
        self.post()

    def end(self, run, status):
        if status.state == "failed":
            what = status.error["message"].splitlines()[0]
            self.pending.append(f"run {run.id} has failed: {what} ({run.directory})")
        self.post()

    def post(self):
        """Posts what is pending; a text that the webhook refuses is posted again with the next call."""
        while self.pending:
            body = json.dumps({"text": self.pending[0]}).encode()
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=5).close()
            self.pending.pop(0)


class StatsD(Tracker):
    """Counts attempts, restarts and runs, and sends the metrics that rank 0 reports as gauges."""

    def __init__(self, host="127.0.0.1", port=8125, prefix="rankzero"):
        self.host = host
        self.port = port
        self.prefix = prefix

    def begin(self, run):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.connect((self.host, self.port))

    def add(self, run, events):
        metrics = {}
        for event in events:
            if event["type"] == "state" and event["state"] == "starting":
                self.send("attempts:1|c")
            elif event["type"] == "restart":
                self.send(f"restarts.{event['cause'] or 'failed'}:1|c")
            elif event["type"] == "metric" and event["rank"] == 0:
                metrics.update(event["metrics"])
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:  # a sign means a change
                self.send(f"metric.{re.sub('[^a-zA-Z0-9_-]+', '_', name)}:{value:g}|g")

    def end(self, run, status):
        if status.final:
            self.send(f"runs.{status.state}:1|c")
            if status.started and status.ended:
                self.send(f"run:{(status.ended - status.started) * 1000:.0f}|ms")
        self.socket.close()

    def send(self, line):
        self.socket.send(f"{self.prefix}.{line}".encode())
