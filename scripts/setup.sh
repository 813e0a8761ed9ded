#!/usr/bin/env bash
# Makes .venv with everything locked for its Python in constraints/, and finds or installs Java. Safe to run again.
# PYTHON=3.12 asks for one Python, VENV for another folder.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
supported="3.13 3.12 3.11"

die() { echo "setup: $*" >&2; exit 1; }

is_python() { "$1" -c "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$2'.split('.'))))" 2>/dev/null; }

# The newest supported Python of the PATH. One that was asked for may also be pyenv's.
find_python() {
  local version candidate
  for version in ${PYTHON:-$supported}; do
    for candidate in "python$version" python3 ${PYTHON:+"$HOME/.pyenv/versions/$version".*/bin/python3}; do
      if is_python "$candidate" "$version"; then echo "$candidate"; return; fi
    done
  done
  die "Python ${PYTHON:-3.11, 3.12 or 3.13} is needed and was not found; install it, for example python3.11"
}

# uv installs in parallel; without it (nor a wheel of it) pip does the same, one after the other.
find_uv() {
  command -v uv && return
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' "$lock")" >/dev/null 2>&1 &&
    echo "$venv/bin/uv"
}

# uv reads nothing of pip's configuration, but a mirror or a folder of wheels counts for it, too.
tell_uv_what_pip_knows() {
  local line value
  while IFS= read -r line; do
    value=${line#*=}; value=${value//\'/}; value=${value//\\n/ }
    case ${line%%=*} in
      *.index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
      *.extra-index-url) export UV_INDEX="${UV_INDEX:-$value}" ;;
      *.find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-${value// /,}}" ;;
    esac
  done < <("$venv/bin/python" -m pip config list)
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
  # pip trusts the system's certificates; a uv of before 0.10 has the second name.
  export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
}

install() {
  if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python "$venv/bin/python" "$@" 2>"$venv/uv.log" && return
    echo "setup: uv failed, so pip installs, which takes minutes; see $venv/uv.log" >&2
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  "$python" -m venv "$venv"
fi
lock=constraints/$("$venv/bin/python" -c 'import sys; print(*sys.version_info[:2], sep=".")').txt
[ -f "$lock" ] || die "$venv has a Python without a lock in constraints/; remove $venv and run this again"
stamp=$venv/.installed
want=$(cat "$lock" pyproject.toml scripts/setup.sh | cksum)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
  echo "setup: installing $(grep -c == "$lock") locked packages into $venv"
  uv=$(find_uv || true)
  [ -z "$uv" ] || tell_uv_what_pip_knows
  # The lock names every package, so nothing is left to resolve but torch's CUDA libraries, which a CPU build has not.
  grep -v '^torch==' "$lock" > "$venv/without-torch.txt"
  install --no-deps -r "$venv/without-torch.txt"
  install --constraint "$lock" "$(grep '^torch==' "$lock")"
  install --no-deps --no-build-isolation -e .
  # Where the environment forbids Python to write compiled modules, every process would compile them again.
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" core airflow_provider dagster_integration >/dev/null 2>&1 || true
  rm -f "$venv/spark-classes.jsa"
  echo "$want" > "$stamp"
fi

java_version() { "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'; }
java=${JAVA_HOME:+$JAVA_HOME/bin/java}
[ -x "${java:-}" ] || java=$(command -v java || true)
if [ -z "$java" ] || [ "$(java_version "$java")" -lt 17 ]; then
  hint="Spark needs Java 17 or newer: install it with 'apt-get install openjdk-17-jre-headless' (or set JAVA_HOME)"
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "$hint"
  echo "setup: installing a headless JRE"
  { apt-get update -qq && apt-get install -y -qq openjdk-17-jre-headless; } >/dev/null || die "$hint"
fi

# The suite's JVMs start with half the processor time. They start without, too.
[ -e "$venv/spark-classes.jsa" ] || "$venv/bin/python" -m tests.spark_classes >/dev/null 2>&1 || true
