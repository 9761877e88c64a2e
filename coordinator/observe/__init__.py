"""What is shown of a run: status, metrics, logs; who is slow and what is done about it."""
