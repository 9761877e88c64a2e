"""What a daemon needs of its process: a clock, workers, sockets. Real ones here, virtual ones in `sim`."""
