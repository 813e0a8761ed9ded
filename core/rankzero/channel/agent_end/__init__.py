"""The agent's end of the channel: it finds the driver, keeps the connection, sends messages, and fetches files."""
