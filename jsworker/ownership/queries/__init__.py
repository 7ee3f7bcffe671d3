"""Reads that decide nothing: jobs, what waits, the server and the schema.

Every query stays cheap in a database of ten million jobs: catalogs and statistics, the partial indexes by
their own predicates, and counts that end at a bound.
"""
