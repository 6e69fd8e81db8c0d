"""Shipped tools for tests: faults on any effect, and every state that a power loss can leave behind."""
