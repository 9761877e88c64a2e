"""The state directory: journal, snapshots, copies, and their recovery."""
