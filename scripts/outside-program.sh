#!/usr/bin/env bash
# Writes a project with `paceline new`, builds it outside of the workspace as `cargo build` does, without the workspace's profile
# and therefore without optimization, and runs its test, training and every collective operation in it. Frames on the stack
# are many times as large there. Where there is mpirun, the program has the mpi transport too.
#
#   scripts/outside-program.sh
#
# Builds in CARGO_TARGET_DIR/outside. Takes about three minutes on two cores the first time, and seconds afterwards, once the
# tests of the workspace are built.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/outside")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# As the tests of the workspace have built it.
program=${CARGO_TARGET_DIR:-target}/debug/paceline
[ -x "$program" ] || cargo build --quiet --locked -p paceline
"$program" new "$work/outside"
# Its profiles would optimize what computes.
sed -i '/^\[profile/,$d' "$work/outside/Cargo.toml"
mkdir "$work/outside/src/bin"
cp Cargo.lock "$work/outside"
if command -v mpirun >/dev/null; then
  sed -i '/^paceline = /s/ }$/, features = ["mpi"] }/' "$work/outside/Cargo.toml"
fi

# Every reduction of every element type, on the communication thread and on the caller's, whose stack is that of the
# standard library.
cat >"$work/outside/src/bin/reductions.rs" <<'END'
use paceline::collectives::{Group, ReduceOp};
use paceline::memory::{Allocator, Category, DType};

fn main() {
    for world in [1, 2, 3, 16] {
        std::thread::scope(|scope| {
            for group in Group::threads(world) {
                scope.spawn(move || {
                    for dtype in DType::ALL {
                        let data = Allocator::new().tensor(dtype, [5_003], Category::Gradients).unwrap();
                        data.fill_zero().unwrap();
                        for op in ReduceOp::ALL {
                            group.all_reduce(&data, op).unwrap();
                            group.all_reduce_async(&data, op).unwrap().wait().unwrap();
                        }
                    }
                });
            }
        });
    }
}
END

cd "$work/outside"
export CARGO_TARGET_DIR="$target" CARGO_PROFILE_DEV_DEBUG=false
cargo build --quiet
echo "built after $SECONDS s"
cargo test --quiet
"$target/debug/reductions"
small="--warmup-steps 0 --timeout 60 --quiet"
weights=
for strategy in one_reduce ddp sharded3; do
  "$target/debug/outside" train $small --model scaled_net --data circle --strategy "$strategy" --steps 20 --json summary.json
  digest=$(grep '"weights_sha256"' summary.json)
  [ "$digest" = "${weights:=$digest}" ] || { echo "$strategy ends with other weights"; exit 1; }
done
small="$small --samples 64 --global-batch-size 16 --steps 3"
for transport in thread shm tcp; do
  "$target/debug/outside" train $small --channels 4 --hidden 8 --transport "$transport" --strategy bucket_ddp_async
done
if command -v mpirun >/dev/null; then
  if [ "$(id -u)" = 0 ]; then allow=(--allow-run-as-root); else allow=(); fi
  timeout 120 mpirun --oversubscribe "${allow[@]}" -n 2 "$target/debug/outside" train $small --channels 4 --hidden 8 --transport mpi
  timeout 120 mpirun --oversubscribe "${allow[@]}" -n 2 "$target/debug/outside" bench all_reduce --transport mpi -b 1K -e 64K
else
  echo "left out: the mpi transport, because there is no mpirun"
fi
"$target/debug/outside" train $small --model llama --layers 1 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 --threads 2 --strategy sharded3 --optimizer adamw
echo "a program outside of the workspace trains, after $SECONDS s"
