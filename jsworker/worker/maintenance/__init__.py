"""Loops beside the jobs: the relay, retention, and watches over schema, stream and failovers."""
