"""Reads that decide nothing; each stays cheap in a database of ten million jobs."""
