"""A concurrent random walk: the ownership functions on a real PostgreSQL, all else simulated."""
