"""Hooks on real models, each compared with a witness that knows nothing of them."""
