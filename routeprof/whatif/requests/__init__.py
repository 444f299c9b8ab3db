"""Requests with the routing that was recorded of them, and batches composed of them."""
