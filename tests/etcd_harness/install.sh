#!/usr/bin/env bash
# Bring an etcd whose members survive being killed (Debian's package; PyPI's release does not). Prints
# the program, as its last line.
set -euo pipefail
named=${TEST_ETCD:-$(command -v etcd || true)}
if [ -n "$named" ]; then
  echo "$named"
  exit 0
fi
"$(dirname "${BASH_SOURCE[0]}")/../debian_program.sh" etcd-server usr/bin/etcd || {
  echo "SKIPPED: members of etcd are stopped and cut off, and none is killed" >&2
  exit 77
}
