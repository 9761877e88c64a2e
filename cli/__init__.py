"""The commands of `farloop`, one module each."""
