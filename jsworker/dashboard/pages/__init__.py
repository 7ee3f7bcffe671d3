"""A module for each page: ``read`` returns what its template shows; beside it what can be done from there."""
