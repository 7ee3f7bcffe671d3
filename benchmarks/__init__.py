"""jsworker side by side with its peers and with the raw loop, on servers of its own."""
