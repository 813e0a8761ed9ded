"""The agent's end of the channel: finding the driver, keeping the connection, sending and fetching."""
