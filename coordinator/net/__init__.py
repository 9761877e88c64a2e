"""Sessions of the coordinator, their limits, and what is known of links."""
