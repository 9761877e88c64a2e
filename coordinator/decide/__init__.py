"""What the coordinator decides. Sans-I/O: events in, commands and records out; the time is passed in."""
