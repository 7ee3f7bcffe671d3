"""Looking at PostgreSQL for whoever has to judge it: the server, the schema, the jobs. Only ``orphans`` writes.

Every query stays cheap in a database of ten million jobs: catalogs and statistics, the partial indexes by
their own predicates, and counts that end at a bound.
"""
