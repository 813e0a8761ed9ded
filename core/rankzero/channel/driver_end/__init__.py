"""The driver's end of the channel: one listener, a connection that must prove the secret, a peer for each agent."""
