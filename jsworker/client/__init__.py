"""For producers and operators: enqueue jobs, read them, cancel, retry and clear them."""
