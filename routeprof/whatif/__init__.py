"""Predictions from a recording: arrays in, numbers out."""
