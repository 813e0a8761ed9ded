"""The driver's end of the channel: one listener, which checks the secret of each connection, and a peer per agent."""
