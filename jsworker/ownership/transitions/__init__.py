"""What changes a job's row: one verb of the protocol a file."""
