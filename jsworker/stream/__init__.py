"""The stream door: NATS JetStream delivers messages."""
