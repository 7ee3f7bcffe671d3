"""NATS JetStream: the messages that tell of jobs."""
