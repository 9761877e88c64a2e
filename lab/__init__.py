"""Measures and breaks runs. Nothing else imports it, and farloop trains without it."""
