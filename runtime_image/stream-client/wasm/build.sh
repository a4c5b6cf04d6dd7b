#!/usr/bin/env bash
# Builds ../src/zstd.wasm from zstd's own source: compiler and source come from the Python package index, pinned by hash.
# With --check nothing is written: fails when what is committed isn't what comes out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
committed=$PWD/../src/zstd.wasm
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

cat >"$work/compiler.txt" <<'PINS'
ziglang==0.13.0.post1 --hash=sha256:5ff0f2cb0d583b4f94820909612043f62e4d1d9a8bed77ceec088a01fc2ef015
PINS
cat >"$work/source.txt" <<'PINS'
zstandard==0.25.0 --hash=sha256:7713e1179d162cf5c7906da876ec2ccb9c3a9dcbdffef0cc7f70c3667a205f0b
PINS
uvx pip download --quiet --no-deps --require-hashes --dest "$work" --platform manylinux_2_12_x86_64 --only-binary :all: \
  --requirement "$work/compiler.txt"
uvx pip download --quiet --no-deps --require-hashes --dest "$work" --no-binary zstandard --requirement "$work/source.txt"
python3 -m zipfile -e "$work"/ziglang-*.whl "$work"
tar -xzf "$work"/zstandard-*.tar.gz -C "$work" --strip-components=1
chmod +x "$work/ziglang/zig"

headers=$work/ziglang/lib/libc/include
ZIG_GLOBAL_CACHE_DIR=$work/cache ZIG_LOCAL_CACHE_DIR=$work/cache "$work/ziglang/zig" cc -target wasm32-wasi -mexec-model=reactor \
  -Os -flto -w -DNDEBUG -DDYNAMIC_BMI2=0 -DZSTD_DISABLE_ASM -mbulk-memory -fno-stack-protector -nostdlib \
  -isystem "$headers/wasm-wasi-musl" -isystem "$headers/generic-musl" -I"$work/zstd" \
  -Wl,-z,stack-size=65536 -Wl,--no-entry -Wl,--gc-sections -Wl,--strip-all -o "$work/zstd.wasm" decoder.c
chmod 644 "$work/zstd.wasm"

if [ "${1:-}" = --check ]; then
  cmp "$committed" "$work/zstd.wasm" || { echo "src/zstd.wasm is stale: run wasm/build.sh"; exit 1; }
else
  cp "$work/zstd.wasm" "$committed"
  echo "src/zstd.wasm: $(stat -c %s "$committed") bytes, $(gzip -9c "$committed" | wc -c) compressed"
fi
