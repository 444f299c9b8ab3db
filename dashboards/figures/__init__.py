"""Figures: arrays in, ``go.Figure`` out. Nothing here knows a recording or a page."""
