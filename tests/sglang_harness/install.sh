#!/usr/bin/env bash
# Install SGLang's Python, and what its caches import beside what ./run setup installs, into a folder that is
# kept: install.sh PYTHON. Prints the folder, as its last line. No kernels are in it (tests/sglang_harness/stand_ins.py).
set -euo pipefail
python=${1:?install.sh PYTHON}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/restow/sglang
stamp=$folder/.restow-setup
wanted=$(cat "${BASH_SOURCE[0]}" "$root"/docker/{install,locked/sglang.txt} | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  rm -rf "$folder"
  PIP_TARGET=$folder "$root/docker/install" "$python" sglang >&2
  echo "$wanted" >"$stamp"
fi
echo "$folder"
