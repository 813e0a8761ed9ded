#!/usr/bin/env bash
# Makes .venv with everything locked in constraints.txt, and finds or installs Java. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "setup: $*" >&2; exit 1; }

stamp=.venv/.installed
want=$(cat constraints.txt pyproject.toml | cksum)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
  python=""
  for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || die "Python 3.11 is needed (the versions in constraints.txt are locked for it); install python3.11"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "setup: installing $(grep -c == constraints.txt) locked packages into .venv (a few minutes the first time)"
  # The lock names every package, so nothing is left to resolve.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
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
