"""The protocol between node and coordinator, sans-I/O: messages, frames, blobs, sessions. See `wire/README.md`."""
