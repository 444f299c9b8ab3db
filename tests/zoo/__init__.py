"""Tiny random models of every MoE family of transformers, and what their experts executed."""
