"""The authenticated connection between the driver and its agents.

The layers, from the lowest: `frames` and `auth` (the proof of the run's secret); `session`, which outlives cut
connections; the driver's end (`server` with a `peer` for each agent, and `files`) and the agent's end (`client`, with
`keeper` and `exchange`). Its size limits are in `frames`. The channel does not interpret
ranks or results, and never unpickles. An agent whose driver is slow keeps lines on its disk. A failure carries the
rank's last lines with it, since it overtakes them. The driver's end has no TLS socket, but records between transport
and connection, so connections in the middle of a TLS handshake count as unproved ones. Why there is such a channel:
docs/architecture.md#a-channel-of-rankzero-and-no-grpc. `messages` has the kinds of messages that driver, agents and
ranks exchange, and `message` their base.
"""
