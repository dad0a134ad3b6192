#!/usr/bin/env bash
# Containers, for real. Builds both images; runs docker/daemons.yaml, and checks that every answer is
# exact and that the bytes went over TCP between containers; runs docker/compose.yaml, and kills,
# pauses, cuts off and restarts what is in it (test_serving.py).
# Ends with 0 (passed), 1 (failed), or 77 (skipped: says why).
#
# Uses the Docker engine that answers; where none does, and this is root on Debian, it installs one,
# runs it on a socket and a data folder of its own, and removes them afterwards.
#   RESTOW_BASE            base image to build on; else that of docker/Dockerfile if it can be pulled; else
#                          Debian's own Python, made with debootstrap
#   RESTOW_CONTAINERS_DIR  folder for the engine's data and the base; kept, so the next run is quick
#   RESTOW_PYTHON          a Python that has the package and pytest; else .venv/bin/python
#   RESTOW_CONTAINER_LOGS  folder for the containers' logs; else one in /tmp, kept where it failed
#   PIP_CERT, PIP_FIND_LINKS, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST   as for pip;
#                          pip's configuration on this host counts too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export COMPOSE_PROJECT_NAME=restow-test-$$ RESTOW_TAG=test-$$ UCX_LOG_LEVEL=info
export DOCKER_CLI_HINTS=false
started=$SECONDS
kept=${RESTOW_CONTAINERS_DIR:-}
folder=$(realpath -m "${kept:-$(mktemp -d /tmp/restow-containers.XXXXXX)}")
mkdir -p "$folder"
# Sockets have a length limit, so those of an engine of ours are not below a folder of any length.
sockets=$(mktemp -d /tmp/restow-engine.XXXXXX)
log=$folder/log
: >"$log"
engine_pid='' our_base='' prompts=0 compose_command=() staged=() tagged=()

say() { printf '== %s\n' "$*"; }

skip() {
  tail -n 5 "$log" >&2
  printf '\nSKIPPED: the containers were NOT tested: %s\n' "$*" >&2
  exit 77
}

fail() {
  printf '\nFAILED: %s\n' "$*" >&2
  tail -n 40 "$log" >&2
  exit 1
}

quietly() { nice "$@" >>"$log" 2>&1; }

compose() { "${compose_command[@]}" -f docker/daemons.yaml "$@"; }

container() {
  docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
    --filter "label=com.docker.compose.service=$1" --filter label=com.docker.compose.oneoff=False
}

tear_down() {
  set +e
  exec 2>>"$log"
  if [ ${#compose_command[@]} -gt 0 ]; then compose down -v --remove-orphans -t 5 >>"$log" 2>&1; fi
  if [ ${#tagged[@]} -gt 0 ]; then docker rmi "${tagged[@]}" >>"$log" 2>&1; fi
  if [ ${#staged[@]} -gt 0 ]; then rm -f "${staged[@]}"; fi
  if [ -n "$engine_pid" ]; then
    kill "$engine_pid"
    wait "$engine_pid"
    umount "$sockets"/exec/netns/*
  elif [ -n "$our_base" ] && [ -z "$kept" ]; then
    docker rmi "$our_base" >>"$log" 2>&1
  fi
  rm -rf --one-file-system "$sockets"
  if [ -z "$kept" ]; then rm -rf --one-file-system "$folder"; fi
}
trap tear_down EXIT
trap 'exit 130' INT TERM

install() {
  [ "$(id -u)" = 0 ] || skip "$* is missing, and installing it takes root"
  command -v apt-get >/dev/null || skip "$* is missing, and this is no Debian"
  say "installing $*"
  quietly apt-get update || skip "apt-get update does not work here"
  quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ||
    skip "apt-get does not install $*"
}

have_engine() {
  if docker info >/dev/null 2>&1; then return; fi
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v iptables >/dev/null || missing+=(iptables)
  if [ ${#missing[@]} -gt 0 ]; then install "${missing[@]}"; fi
  [ "$(id -u)" = 0 ] || skip "no Docker engine answers, and starting one takes root"
  export DOCKER_HOST=unix://$sockets/docker.sock
  nice dockerd --host "$DOCKER_HOST" --data-root "$folder/data" --exec-root "$sockets/exec" \
    --pidfile "$sockets/pid" >"$folder/dockerd.log" 2>&1 &
  engine_pid=$!
  local waited
  for waited in $(seq 60); do
    if docker info >/dev/null 2>&1; then
      say "Docker engine of our own after $waited s"
      return
    fi
    kill -0 "$engine_pid" 2>/dev/null || break
    sleep 1
  done
  tail -n 5 "$folder/dockerd.log" >>"$log"
  skip "no Docker engine starts here; its last words are above"
}

have_compose() {
  if docker compose version >/dev/null 2>&1; then
    compose_command=(docker compose)
    return
  fi
  command -v docker-compose >/dev/null || install docker-compose
  compose_command=(docker-compose)
}

have_base() {
  if [ -n "${RESTOW_BASE:-}" ]; then
    docker image inspect "$RESTOW_BASE" >/dev/null 2>&1 || quietly docker pull "$RESTOW_BASE" ||
      skip "the base image $RESTOW_BASE can't be had"
    return
  fi
  RESTOW_BASE=$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)
  export RESTOW_BASE
  if docker image inspect "$RESTOW_BASE" >/dev/null 2>&1; then return; fi
  if quietly timeout 180 docker pull "$RESTOW_BASE"; then return; fi
  RESTOW_BASE=restow-base-debian:bookworm
  if docker image inspect "$RESTOW_BASE" >/dev/null 2>&1; then return; fi
  command -v debootstrap >/dev/null || install debootstrap
  [ "$(id -u)" = 0 ] || skip "no base image can be pulled, and debootstrap takes root"
  say "no registry answers: making a base of Debian bookworm"
  rm -rf --one-file-system "$folder/root"
  quietly debootstrap --variant=minbase --include=python3,python3-venv bookworm "$folder/root" ||
    skip "debootstrap does not work here"
  rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
  tar -C "$folder/root" -c . | docker import - "$RESTOW_BASE" >>"$log"
  our_base=$RESTOW_BASE
  rm -rf --one-file-system "$folder/root"
}

# Where not even the base runs, in a network of its own, nothing of ours is at fault.
have_containers() {
  local network=$COMPOSE_PROJECT_NAME-try rc=0
  quietly docker network create --internal "$network" || skip "no network can be made here"
  quietly docker run --rm --network "$network" "$RESTOW_BASE" python3 --version || rc=$?
  quietly docker network rm "$network"
  [ "$rc" = 0 ] || skip "no container runs here"
}

# What pip needs on this host goes into docker/wheelhouse, which git ignores and no image keeps.
stage_for_pip() {
  local pip=(python3 -m pip config get) torch cert wheel place
  torch=$(sed -n 's/^torch==//p' constraints.txt)
  cert=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
  if [ -f "$cert" ]; then stage "$cert" ca.pem; fi
  for place in ${PIP_FIND_LINKS:-$("${pip[@]}" global.find-links 2>/dev/null || true)}; do
    for wheel in "${place#file://}"/torch-"$torch"*.whl; do
      if [ -f "$wheel" ]; then stage "$wheel" "$(basename "$wheel")"; fi
    done
  done
}

stage() {
  local target=docker/wheelhouse/$2
  if [ -e "$target" ]; then return; fi
  staged+=("$PWD/$target")
  cp "$1" "$target"
}

build() {
  local target=$1 before=$SECONDS name arguments=(--network host --build-arg BASE="$RESTOW_BASE")
  arguments+=(--build-arg RESTOW_COMMIT="$(git rev-parse HEAD 2>/dev/null || true)")
  for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST; do
    if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name"); fi
  done
  tagged+=("restow-$target:$RESTOW_TAG")
  quietly docker build "${arguments[@]}" -f docker/Dockerfile --target "$target" \
    -t "restow-$target:$RESTOW_TAG" . || fail "image $target does not build"
  local size base
  size=$(docker image inspect -f '{{.Size}}' "restow-$target:$RESTOW_TAG")
  base=$(docker image inspect -f '{{.Size}}' "$RESTOW_BASE")
  say "image $target: $(((size - base) / 1000000)) MB over a base of $((base / 1000000)) MB," \
    "built in $((SECONDS - before)) s"
}

check_image() {
  local found
  found=$(docker run --rm --network none --entrypoint sh "restow-$1:$RESTOW_TAG" -c \
    'find / -xdev \( -name ca.pem -o -path /wheelhouse -o -name pip.conf \) 2>/dev/null; id -u')
  [ "$found" = 10001 ] || fail "image $1 runs as, or keeps of its build: $found"
  docker run --rm --network none --entrypoint python "restow-$1:$RESTOW_TAG" -c '
import json
from importlib.metadata import distributions
listed = json.load(open("/opt/restow/sbom.cdx.json"))["components"]
there = {(one.name.lower(), one.version) for one in distributions()}
missing = there - {(one["name"].lower(), one["version"]) for one in listed}
assert not missing and ("restow" in dict(there)), missing' >>"$log" 2>&1 ||
    fail "the list of what image $1 has is not whole"
}

run_demo() {
  local before=$SECONDS said=$folder/answers rc=0
  compose up -d --no-build broker p0 p1 d0 d1 d2 d3 >>"$log" 2>&1 || fail "the containers do not start"
  compose run --rm -T d >"$said" 2>"$folder/answers.err" || rc=$?
  cat "$folder/answers.err" >>"$log"
  cat "$said"
  if [ "$rc" != 0 ]; then
    compose logs --no-color --tail 20 >>"$log" 2>&1
    compose ps >>"$log" 2>&1
    fail "D ended with $rc"
  fi
  local p
  p=$(container p)
  [ "$(timeout 60 docker wait "$p")" = 0 ] || fail "P failed: $(docker logs --tail 5 "$p" 2>&1)"
  docker logs "$p" 2>/dev/null | grep '^P handed over'
  say "compose demo: $((SECONDS - before)) s"
  local line exact
  line=$(grep -E '^[0-9]+ of [0-9]+ prompts exact to the last bit' "$said") || fail "no count"
  read -r exact _ prompts _ <<<"$line"
  if [ "$exact" != "$prompts" ] || [ "$prompts" -lt 1 ]; then fail "$line"; fi
}

# UCX itself says over which device it reads from another host; the kernel says how many bytes came,
# and the broker how many had to.
check_wire() {
  local rank id lanes came total=0 figures
  for rank in d0 d1 d2 d3; do
    id=$(container "$rank")
    lanes=$(docker logs "$id" 2>&1 | grep -oE 'inter-node cfg#.*' | sort -u)
    case $lanes in
      *rma*tcp/eth0*) ;;
      *) fail "the agent of $rank does not read over tcp/eth0: ${lanes:-no lane to another host}" ;;
    esac
    if docker logs "$id" 2>&1 | grep -qE 'cfg#.*\((sysv|posix|cma|xpmem)'; then
      fail "the agent of $rank has lanes over shared memory"
    fi
    came=$(docker exec "$id" sed -n 's/^ *eth0: *\([0-9]*\).*/\1/p' /proc/net/dev)
    total=$((total + came))
    say "$rank: UCX: ${lanes##*$'\n'}; eth0 received $came bytes"
  done
  figures=$(docker exec "$(container broker)" restow status --json) || fail "no status: $figures"
  python3 - "$total" "$1" "$figures" <<'END' || fail "the broker's figures are not those of the demo"
import json
import sys

came, prompts, figures = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
done, live, read = figures["handoffs_ended"]["DONE"], figures["handoffs_live"], figures["bytes_read"]
print(f"== broker: {done} handoffs done, {live} live, {read} bytes read; {came} came in over eth0")
sys.exit(not (done == prompts and live == 0 and 0 < read <= came))
END
}

serve_and_break() {
  local before=$SECONDS python=${RESTOW_PYTHON:-$PWD/.venv/bin/python} rc=0
  export RESTOW_COMPOSE="${compose_command[*]}"
  export RESTOW_CONTAINER_LOGS=${RESTOW_CONTAINER_LOGS:-$(mktemp -d /tmp/restow-container-logs.XXXXXX)}
  "$python" -m pytest tests/containers/test_serving.py -p no:cacheprovider || rc=$?
  [ "$rc" = 0 ] || fail "of what was served; the containers' logs are in $RESTOW_CONTAINER_LOGS"
  rm -rf --one-file-system "$RESTOW_CONTAINER_LOGS"
  say "serving: $((SECONDS - before)) s"
}

command -v docker >/dev/null || install docker.io
have_engine
have_compose
have_base
have_containers
stage_for_pip
build broker
build agent
check_image broker
check_image agent
run_demo
check_wire "$prompts"
compose down -v --remove-orphans -t 5 >>"$log" 2>&1
serve_and_break
say "passed in $((SECONDS - started)) s"
