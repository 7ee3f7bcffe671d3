"""The ownership door: PostgreSQL decides who owns each job."""
