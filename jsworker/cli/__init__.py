"""The command line. Nothing is imported here: worker processes start from this package, too."""
