#!/usr/bin/env bash
# Bring an etcd whose members survive being killed (Debian's package; PyPI's release does not), into
# a folder that is kept. Prints the program, as its last line.
set -euo pipefail
left_out() {
  echo "SKIPPED: $1: members of etcd are stopped and cut off, and none is killed" >&2
  exit 77
}
named=${TEST_ETCD:-$(command -v etcd || true)}
if [ -n "$named" ]; then
  echo "$named"
  exit 0
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/restow/etcd
if [ ! -x "$cache/usr/bin/etcd" ]; then
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || left_out "no etcd is here, and no Debian to bring one"
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  if [ ! -x "$cache/usr/bin/etcd" ]; then
    echo "bringing Debian's etcd-server for tests that kill its members" >&2
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    fetch() { (cd "$folder" && apt-get download etcd-server) >/dev/null 2>&1; }
    fetch || { apt-get update >/dev/null 2>&1 && fetch; } || left_out "Debian's etcd-server can't be had"
    dpkg-deb -x "$folder"/etcd-server_*.deb "$cache"
  fi
fi
echo "$cache/usr/bin/etcd"
