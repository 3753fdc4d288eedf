//! A data set of your own: noisy images of waves, whose class is the direction of the wave.
//! `cargo run --release --example own_dataset -- train --data waves --momentum 0.9 --nproc 2 --evaluate`

use std::f32::consts::{PI, TAU};
use std::process::ExitCode;
use std::sync::Arc;

use paceline::prelude::*;

/// The data set with its settings, which are its flags.
#[derive(Debug, Args)]
struct Waves {
    /// Waves: images to train on; a quarter as many are to test on
    #[arg(long, value_name = "N", default_value_t = 2000)]
    images: usize,
    /// Waves: the largest noise of a pixel; the wave itself goes from -1 to 1
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    noise: f32,
}

impl Own for Waves {
    const NAME: &str = "waves";
    const ABOUT: &str = "Noisy waves in one of four directions, with a random phase";
}

impl DataSettings for Waves {
    fn open(&self, seed: u64, split: Split) -> paceline::Result<Arc<dyn Dataset>> {
        let len = if split == Split::Train { self.images } else { self.images.div_ceil(4) };
        Ok(Arc::new(Images { len, noise: self.noise, seed: mix(mix(seed) ^ split as u64) }))
    }
}

/// One part of the data set.
struct Images {
    len: usize,
    noise: f32,
    seed: u64,
}

impl Dataset for Images {
    fn len(&self) -> usize {
        self.len
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [16, 16, 1]), Field::class(4)] // height, width, channels
    }

    /// Each rank reads for itself, so an image depends on nothing but the seed and its index.
    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let image = mix(self.seed ^ mix(index as u64));
        let random = |at| (mix(image ^ mix(at)) >> 40) as f32 / (1 << 24) as f32; // 0 to 1
        let (class, phase) = (image % 4, TAU * random(0));
        let (down, right) = (PI / 4.0 * class as f32).sin_cos();
        for (at, pixel) in sample.f32("inputs").iter_mut().enumerate() {
            let place = down * (at / 16) as f32 + right * (at % 16) as f32;
            *pixel = (phase + place).sin() + self.noise * (2.0 * random(1 + at as u64) - 1.0);
        }
        sample.set_class(class as i64);
    }
}

/// Numbers without a pattern from numbers in a row, as SplitMix64 makes them.
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn main() -> ExitCode {
    Program::new().data_set::<Waves>().main()
}
