#!/usr/bin/env bash
# Install Chromium for the tests of the status page, where that can be done: as root on Debian.
set -euo pipefail
for name in chromium chromium-browser google-chrome chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "SKIPPED: no browser, and none can be installed without root and apt-get:" \
    "the status page is not tested in one" >&2
  exit 0
fi
echo "installing Chromium for the tests of the status page" >&2
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null; then
  echo "SKIPPED: Chromium can't be installed: the status page is not tested in a browser" >&2
fi
