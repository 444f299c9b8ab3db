"""Print the dashboard's JSON."""

from __future__ import annotations

import json
import sys

from routeprof.dashboards.grafana.model import dashboard

sys.stdout.write(json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n")
