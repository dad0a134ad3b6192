#!/usr/bin/env bash
# Install what the tests of the contract in another language need: Node, as root on Debian, and the
# packages of package-lock.json, into a folder that is kept. Prints that folder, as its last line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
left_out() {
  echo "SKIPPED: $1: the contract is not tried in another language" >&2
  exit 77
}
usable() { command -v npm >/dev/null && node -e 'process.exit(parseInt(process.versions.node) < 18 ? 1 : 0)' 2>/dev/null; }
if ! usable; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    left_out "no Node 18 or newer with npm, and none can be installed without root and apt-get"
  fi
  echo "installing Node for the tests of the contract" >&2
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends nodejs npm; } >/dev/null || true
  usable || left_out "Node 18 can't be installed"
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/restow/contract-node
lock=$(cat package.json package-lock.json | cksum | cut -d ' ' -f 1)
folder=$cache/$lock
if [ ! -e "$folder/whole" ]; then
  echo "installing the packages of tests/contract_node/package-lock.json" >&2
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  if [ ! -e "$folder/whole" ]; then
    rm -rf "$folder"
    mkdir "$folder"
    cp package.json package-lock.json "$folder"
    npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund >&2 || left_out "npm can't install its packages"
    touch "$folder/whole"
  fi
fi
echo "$folder"
