"""The demo: a code-evolution analyser on real repositories."""
