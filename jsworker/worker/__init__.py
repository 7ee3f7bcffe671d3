"""The running loops of a worker."""
