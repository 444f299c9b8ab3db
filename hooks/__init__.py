"""Adapters onto engines: one module per engine, each thin, each onto routeprof.capture."""
