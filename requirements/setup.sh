#!/usr/bin/env bash
# Makes .venv (fully pinned, CPU) and .triton (the embedded tritonserver) in the repository.
# Run again, it returns at once unless a pinned list or a package's metadata changed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
venv=$root/.venv
triton=$root/.triton

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "setup: Python 3.11 is needed (the pinned list is for it); set PYTHON=/path/to/python3.11" >&2
  exit 1
}
exec 9>"$root/.setup.lock"
flock 9 # one set-up at a time, in case two terminals start a demo

sums=$(cat requirements/*.txt requirements/setup.sh {backend,client}/pyproject.toml | sha256sum | cut -c1-16)
stamp=$venv/.setup-$sums
if [ -e "$stamp" ]; then exit 0; fi

say() { printf 'setup: %s\n' "$*"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v -e '^WARNING: Location' -e '^$' >&2); }

say "virtual environment (.venv)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
say "torch for the CPU"
pip install -q --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu -r requirements/torch-cpu.txt
say "pinned packages (about 130; two minutes the first time)"
pip install -q --no-deps -r requirements/cpu.txt -r requirements/dev.txt
say "minicpmo-triton and minicpmo-client, editable"
pip install -q --no-deps --no-build-isolation -e backend -e client
if [ ! -x "$triton/pytriton/tritonserver/bin/tritonserver" ]; then
  say "embedded tritonserver (.triton)"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  pip download -q --no-deps -d "$wheels" -r requirements/triton.txt
  rm -rf "$triton.part" && mkdir "$triton.part"
  "$venv/bin/python" - "$wheels" "$triton.part" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheels, out = Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
    wheel.extractall(out, [n for n in wheel.namelist() if n.startswith(("pytriton/tritonserver/", "nvidia_pytriton.libs/"))])
PYTHON
  home=$triton.part/pytriton/tritonserver
  cp "$home/python_backend_stubs/3.11/triton_python_backend_stub" "$home/backends/python/"
  chmod +x "$home/bin/tritonserver" "$home/backends/python/triton_python_backend_stub"
  rm -rf "$triton" && mv "$triton.part" "$triton"
fi
rm -f "$venv"/.setup-*
touch "$stamp"
say "ready"
