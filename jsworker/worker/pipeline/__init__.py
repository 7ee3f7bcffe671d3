"""A job's way through a worker: pull, claim, run, settle, answer."""
