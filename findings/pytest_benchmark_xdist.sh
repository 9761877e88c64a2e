#!/usr/bin/env bash
# pytest-benchmark 5.2.3 beside pytest-xdist 3.8.0: with `filterwarnings = ["error"]` no test of any project runs.
#
# A project that has no benchmark and never names pytest-benchmark runs its tests in parallel, with warnings as errors.
# Where the plugin happens to be installed (machine images for CUDA have it), it warns while pytest configures itself
# that benchmarks are disabled beside xdist. The warning becomes an error, which ends the session as INTERNALERROR with
# exit code 3 before one test is collected. Without -n, and with `-p no:benchmark`, the same tests pass; so they do with
# pytest-benchmark 5.3.1.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pytest==9.2.0 pytest-xdist==3.8.0 pytest-benchmark==5.2.3
cd "$folder"
printf '[pytest]\nfilterwarnings =\n    error\n' > pytest.ini
printf 'def test_one():\n    assert 1 + 1 == 2\n' > test_one.py
code() { "$folder/venv/bin/python" -m pytest -q "$@" > "$folder/said" 2>&1 && echo 0 || echo $?; }
alone=$(code) parallel=$(code -n 2)
said=$(grep -c "INTERNALERROR.*PytestBenchmarkWarning: Benchmarks are automatically disabled because xdist" said || true)
left_out=$(code -n 2 -p no:benchmark)
"$folder/venv/bin/pip" install -q pytest-benchmark==5.3.1
newer=$(code -n 2)
echo "alone: $alone, -n 2: $parallel with $said line(s) of the warning, -n 2 -p no:benchmark: $left_out, 5.3.1: $newer"
[ "$alone $parallel $left_out $newer" = "0 3 0 0" ] && [ "$said" -ge 1 ]
