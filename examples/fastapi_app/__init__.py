"""An application that enqueues jobs in the transactions of its own rows: FastAPI and SQLAlchemy 2.0."""
