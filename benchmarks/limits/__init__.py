"""A limit per key under kill -9: how often it is exceeded, and how many of its slots are lost."""
