"""The authenticated connection between the driver and its agents.

The layers, from the lowest: `frames` and `auth` (the proof of the run's secret); `session`, which outlives cut
connections; the driver's end (`server` with a `peer` for each agent, and `files`) and the agent's end (`client`, with
`keeper` and `exchange`). Its size limits are in `limits`. The channel does not interpret
ranks or results, and never unpickles. An agent whose driver is slow keeps lines on its disk. A failure carries the
rank's last lines with it, since it overtakes them. The driver's end has no TLS socket, but records between transport
and connection, so connections in the middle of a TLS handshake count as unproved ones. Why there is such a channel:
docs/decisions/003-our-own-channel.md. `messages` has the kinds of messages that driver, agents and ranks exchange, and
`message` their base.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "client.ChannelClient client.ChannelClosed auth.Handshake auth.Hello auth.new_secret "
    "files.Uploads server.ChannelServer server.DISCONNECTED server.LOST server.RECONNECTED "
    "frames.Decoder frames.FrameError frames.Message frames.Sealer messages.Assign messages.decode "
    "messages.encode messages.End messages.Failed messages.Finished messages.Join messages.Part "
    "messages.Position messages.Ready messages.Rendezvous messages.Returned messages.Start messages.Uploaded "
    "messages.Usage session.ACK "
    "session.BULK session.CONTENT session.CONTROL session.LOGS session.MADE_UP session.Session "
    "session.UPLOADS tls.Identity tls.make_identity",
)
