"""Subscribers of events: logs and metrics, and the probes that show them."""
