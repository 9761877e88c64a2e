"""What both ends say, sans-I/O: messages, frames, blobs, sessions. `wire/README.md` is the specification."""
