"""Observers: subscribers of events that write logs."""
