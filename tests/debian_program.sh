#!/usr/bin/env bash
# debian_program.sh PACKAGE PROGRAM: take a program out of a Debian package, which is not installed,
# into a folder that is kept. Prints where it is, as its last line; exits with 77 where it can't be had.
set -euo pipefail
package=$1 program=$2
left_out() {
  echo "SKIPPED: $program of Debian's $package: $1" >&2
  exit 77
}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/restow/debian/$package
if [ ! -x "$cache/$program" ]; then
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || left_out "this is no Debian"
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  if [ ! -x "$cache/$program" ]; then
    echo "bringing Debian's $package for tests" >&2
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    fetch() { (cd "$folder" && apt-get download "$package") >/dev/null 2>&1; }
    fetch || { apt-get update >/dev/null 2>&1 && fetch; } || left_out "it can't be fetched"
    # What is there is whole, also if this is cut off.
    dpkg-deb -x "$folder/$package"_*.deb "$folder/whole"
    rm -rf "${cache:?}/${program%%/*}"
    mv "$folder/whole/${program%%/*}" "$cache"
  fi
fi
echo "$cache/$program"
