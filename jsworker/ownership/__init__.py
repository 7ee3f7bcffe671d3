"""PostgreSQL: who owns each job."""
