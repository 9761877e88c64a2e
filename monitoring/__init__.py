"""What an operator sees: the HTTP endpoint of both daemons (metrics, health, status)."""
