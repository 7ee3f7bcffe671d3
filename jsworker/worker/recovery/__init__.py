"""Recovery: what puts jobs back to work whose owner, message or publisher has gone."""
