"""An example application of jsworker: a nightly report on the access logs of web servers."""
