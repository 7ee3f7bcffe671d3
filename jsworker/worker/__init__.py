"""One worker process: its jobs, and the loops beside them."""
