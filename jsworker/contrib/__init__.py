"""For frameworks and services: FastAPI, Django, Flask, Sentry. Each needs the extra of its name."""
