#!/usr/bin/env bash
# Makes a virtual environment in which gemmnorm runs from this checkout: ./setup.sh [run|test]
#
# A PyTorch that the Python in use already has is kept. Otherwise TORCH_SPEC is installed, by default one fixed version:
# an open range would take the newest, which on Linux may bring several gigabytes of CUDA libraries. What pip is told
# by its own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, …) decides which build of it.
#
#   PYTHON      the interpreter to start from (python3)
#   VENV        where the environment is made (.venv)
#   TORCH_SPEC  what to install where PyTorch is missing (torch==2.13.0)
#   CUDA_EXTRA  cu12 or cu13; found out from PyTorch's build where there is an NVIDIA GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

purpose=${1:-run}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

has_torch() { "$1" -c 'import torch' >/dev/null 2>&1; }

works() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$1" >/dev/null 2>&1; }

if works pass; then
  works 'import pip' || "$venv/bin/python" -m ensurepip >/dev/null # it was interrupted, or made without
else
  if [ -e "$venv" ]; then
    [ -e "$venv/pyvenv.cfg" ] || { echo "$venv is there, but is no virtual environment; set VENV to another path" >&2; exit 1; }
    echo "$venv is half-made, without a Python that runs: made anew" >&2
    rm -rf "$venv"
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed" >&2; exit 1; }
  if has_torch "$python"; then
    echo "using the PyTorch of $("$python" -c 'import sys; print(sys.prefix)')"
    "$python" -m venv --system-site-packages "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
py="$venv/bin/python"

# Done before, for these requirements? What the tests need includes what running needs.
stamp="$venv/.gemmnorm-$purpose"
for done in "$stamp" "$venv/.gemmnorm-test"; do
  if cmp -s pyproject.toml "$done"; then exit 0; fi
done

echo "setting up $venv for \`$purpose\`: once, some minutes" >&2
if ! has_torch "$py"; then
  # shellcheck disable=SC2086  (several words are welcome)
  "$py" -m pip install --quiet ${TORCH_SPEC:-torch==2.13.0}
fi

extras=()
[ "$purpose" = test ] && extras+=(test)
if [ -n "${CUDA_EXTRA:-}" ]; then
  extras+=("$CUDA_EXTRA")
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  # The bindings must be of PyTorch's CUDA major version; `gemmnorm doctor` says whether the driver goes with it.
  major=$("$py" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
  case "$major" in
    12 | 13) extras+=("cu$major") ;;
    *) echo "a GPU is here, but this PyTorch ($major) was not built for CUDA 12 or 13: plain PyTorch ops will run" >&2 ;;
  esac
fi
spec=.
[ ${#extras[@]} -gt 0 ] && spec=".[$(IFS=,; echo "${extras[*]}")]"
"$py" -m pip install --quiet --editable "$spec"
cp pyproject.toml "$stamp"
