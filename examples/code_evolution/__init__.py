"""An example of jsworker: count the lines of git repositories over their history, losing no job."""
