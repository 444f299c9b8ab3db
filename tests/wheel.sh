#!/usr/bin/env bash
# Build the wheel, install it into a new environment, and use it away from the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build # setuptools packs whatever an earlier build left there
"$BIN/python" -m build --quiet --outdir "$work/dist" .
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --upgrade pip
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    -c "$root/constraints.txt" "$(echo "$work"/dist/*.whl)[all]"

cd "$work"
export PATH="$work/venv/bin:$PATH"
python -c 'import routeprof.hooks, routeprof.dashboards, routeprof.sample_data'
routeprof --version
routeprof demo --no-serve --out demo
routeprof summary demo/recording --phase decode
routeprof report demo/recording --out report >/dev/null
test -s report/layers.csv && test -s report/report.html
cmp report/layers.csv demo/report/layers.csv
pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" pytest
python -m pytest -p no:dash --markers >markers.txt # pytest finds the plugin
grep -q '^@pytest.mark.routing_limits(' markers.txt
echo "the wheel works"
