"""The authenticated connection between the driver and its agents.

`frames` and the proof of the run's secret (`auth`) at the bottom; above them `session`, which outlives cut
connections; then `driver_end` and `agent_end`. Every bound is in `limits`. Nothing here knows what a rank or a result
is, and nothing here unpickles.
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
