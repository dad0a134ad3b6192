#!/usr/bin/env bash
# Set up the routers of others that tests put before engines, in an environment of their own, which is
# kept: other_routers.sh PYTHON. Prints its folder, as its last line. Dynamo lies in a folder of its own in it,
# without what it requires: its module that names connectors imports nothing.
set -euo pipefail
python=${1:?other_routers.sh PYTHON}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/restow/routers
stamp=$venv/.restow-setup
wanted=$(cat "${BASH_SOURCE[0]}" "$root"/docker/{install,locked/{routers,dynamo}.txt} | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$root/docker/install" "$venv/bin/python" routers >&2
  PIP_TARGET=$venv/dynamo "$root/docker/install" "$venv/bin/python" dynamo >&2
  echo "$wanted" >"$stamp"
fi
echo "$venv"
