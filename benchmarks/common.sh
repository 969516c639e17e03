# For the scripts beside it, which source it: where they run, where results go, and what their files are named after.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-out}
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | grep -oE '[A-Z]*[0-9]{3,}' | head -n 1 | tr '[:upper:]' '[:lower:]') # h200
