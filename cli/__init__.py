"""One front door: `farloop …`."""
