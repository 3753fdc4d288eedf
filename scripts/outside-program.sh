#!/usr/bin/env bash
# Builds a program outside of the workspace as `cargo build` does, without the workspace's profile and therefore without
# optimization, and runs training and every collective operation in it. Frames on the stack are many times as large there.
#
#   scripts/outside-program.sh
#
# Builds in CARGO_TARGET_DIR/outside. Takes about three minutes on two cores the first time, and seconds afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/outside")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/src/bin"
cp Cargo.lock "$work"
{
  printf '[package]\nname = "outside"\nversion = "0.0.0"\nedition = "2024"\n\n[workspace]\n\n'
  printf '[profile.dev]\nopt-level = 0\ndebug = false\n\n[dependencies]\n'
  printf 'paceline = { path = "%s/crates/paceline" }\n' "$root"
  printf 'paceline-collectives = { path = "%s/crates/collectives" }\n' "$root"
  printf 'paceline-memory = { path = "%s/crates/memory" }\n' "$root"
} >"$work/Cargo.toml"

cat >"$work/src/bin/outside.rs" <<'END'
fn main() -> std::process::ExitCode {
    paceline::Program::new().main()
}
END

# Every reduction of every element type, on the communication thread and on the caller's, whose stack is that of the
# standard library.
cat >"$work/src/bin/reductions.rs" <<'END'
use paceline_collectives::{Group, ReduceOp};
use paceline_memory::{Allocator, Category, DType};

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

(cd "$work" && CARGO_TARGET_DIR="$target" cargo build --quiet)
echo "built after $SECONDS s"
cd "$work"
"$target/debug/reductions"
small="--samples 64 --global-batch-size 16 --steps 3 --warmup-steps 0 --timeout 60 --quiet"
for transport in thread shm tcp; do
  "$target/debug/outside" train $small --channels 4 --hidden 8 --transport "$transport" --strategy bucket_ddp_async
done
"$target/debug/outside" train $small --model llama --layers 1 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 --threads 2 --strategy sharded3 --optimizer adamw
echo "a program outside of the workspace trains, after $SECONDS s"
