"""Stands in for SGLang where a test needs an engine that starts at once or misbehaves as told."""
