"""A Grafana dashboard over the metrics of ``routeprof serve-metrics``.

``routeprof.json`` is what ``python -m routeprof.dashboards.grafana`` prints: import it.
"""
