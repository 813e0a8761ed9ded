"""The authenticated connections between the driver and its agents.

`messages` has the kinds of messages; `connection` the proof of the secret, messages and files on one connection, and
the agent's end of it; `server` is the driver's end; `tls` encrypts them. The channel does not interpret ranks or
results, and never unpickles. TCP sends again what a short cut of the network delays; an end that sends nothing for
`bounds.CONNECTION_LOST_AFTER` is lost. Why there is such a channel:
docs/architecture.md#a-channel-of-rankzero-and-no-grpc.
"""
