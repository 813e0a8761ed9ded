"""The authenticated connection between the driver and its agents.

The layers, from the lowest: `frames` and `auth` (the proof of the run's secret); `session`, which outlives cut
connections; `driver_end` and `agent_end`. Every size and time limit is in `limits`. The channel does not interpret
ranks or results, and never unpickles.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "agent_end.client.ChannelClient agent_end.client.ChannelClosed auth.Handshake auth.Hello auth.new_secret "
    "driver_end.files.Uploads driver_end.server.ChannelServer driver_end.server.DISCONNECTED driver_end.server.LOST "
    "driver_end.server.RECONNECTED driver_end.tls.Identity driver_end.tls.make_identity frames.Decoder "
    "frames.FrameError frames.Message frames.Sealer session.ACK session.BULK session.CONTENT session.CONTROL "
    "session.LEFT session.LOGS session.Session session.UPLOADS sockets.listen",
)
