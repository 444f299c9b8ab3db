"""Counting inside the engine. Imports torch, numpy, pyarrow and the standard library only."""
