"""Runs programs that nobody has read: what the policy writes."""
