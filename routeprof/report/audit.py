"""``routeprof audit`` as tables and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from routeprof.plan.audit.mixed import Mixed
from routeprof.plan.audit.verdicts import Verdict
from routeprof.plan.weights import SCHEMES, Audit, MatrixAudit
from routeprof.report.csv import to_csv
from routeprof.report.files import write_text
from routeprof.report.summary import json_data

KEYS = ("layer", "name", "matrix", "expert")


def experts_table(audit: Audit) -> pd.DataFrame:
    """One row for each layer, matrix and expert; columns as in ``docs/audit.md``."""
    return pd.concat([_rows(matrix) for matrix in audit.matrices], ignore_index=True)


def _rows(matrix: MatrixAudit) -> pd.DataFrame:
    columns: dict[str, Any] = {
        "layer": matrix.index,
        "name": matrix.layer,
        "matrix": matrix.name,
        "expert": np.arange(matrix.experts),
        "dtype": matrix.dtype,
        "outputs": matrix.outputs,
        "inputs": matrix.inputs,
        "abs_max": matrix.largest,
        "rms": matrix.rms,
        "outlier_ratio": matrix.outlier_ratio,
        "outlier_share": matrix.outlier_share,
        "not_finite": matrix.broken,
    }
    figures = {"error": matrix.error, "saturated": matrix.saturated, "underflow": matrix.underflow}
    for figure, values in figures.items():
        for place, scheme in enumerate(SCHEMES):
            columns[f"{figure}_{scheme.replace('-', '_')}"] = values[place]
    return pd.DataFrame(columns)


def layers_table(audit: Audit) -> pd.DataFrame:
    """One row for each layer and matrix: its experts' range, and each scheme's worst error."""
    return pd.DataFrame([_layer(matrix) for matrix in audit.matrices])


def _layer(matrix: MatrixAudit) -> dict[str, Any]:
    known = matrix.largest[~np.isnan(matrix.largest)]
    middle = float(np.median(known)) if len(known) else float("nan")
    top = float(known.max()) if len(known) else float("nan")
    return {
        "layer": matrix.index,
        "name": matrix.layer,
        "matrix": matrix.name,
        "experts": matrix.experts,
        "abs_max": top,
        "abs_max_median": middle,
        "max_ratio": top / middle if middle > 0 else float("nan"),
        "outlier_ratio": _worst(matrix.outlier_ratio),
        **{f"error_{scheme.replace('-', '_')}": _worst(matrix.of(scheme)) for scheme in SCHEMES},
    }


def _worst(values: np.ndarray[Any, Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else float("nan")


def audit_json(audit: Audit, found: list[Verdict], plan: Mixed | None) -> dict[str, Any]:
    """Everything, for JSON; what is not known is null."""
    data: dict[str, Any] = {
        "source": str(audit.source),
        "bytes": audit.read,
        "sample": audit.sample,
        "skipped": {reason: len(names) for reason, names in audit.skipped.items()},
        "findings": [asdict(one) for one in found],
        "layers": layers_table(audit).to_dict("records"),
        "experts": experts_table(audit).to_dict("records"),
    }
    if plan is not None:
        data["precision_plan"] = {
            "hot": plan.hot,
            "cold": plan.cold,
            "bytes": plan.bytes,
            "source_bytes": plan.source_bytes,
            "saved_bytes": plan.source_bytes - plan.bytes,
            "low_share": plan.low_share,
            "not_recorded": list(plan.not_recorded),
            "layers": plan.layers.to_dict("records"),
            "experts": plan.rows.to_dict("records"),
        }
    plain: dict[str, Any] = json_data(data)
    return plain


def write_audit(audit: Audit, plan: Mixed | None, directory: Path) -> list[Path]:
    """Write ``experts.csv`` and, with a plan, ``precision.csv``; returns the files."""
    table = experts_table(audit).sort_values(list(KEYS))
    files = [write_text(directory / "experts.csv", to_csv(table))]
    if plan is not None:
        files.append(write_text(directory / "precision.csv", to_csv(plan.rows)))
    return files
