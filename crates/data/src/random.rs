//! Random numbers that depend on their purpose, never on the numbers drawn before.
//!
//! Input: a seed, a purpose, an epoch and an index. Output: a separate generator for these four. So samples
//! can be read in any order, by any rank, and resuming needs no stored state.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// The purpose of the numbers. The same seed gives unrelated numbers for each purpose.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RandomPurpose {
    /// The order of an epoch.
    Shuffle = 1,
    /// The patterns of the synthetic classes.
    Templates = 2,
    /// Synthetic images to train on.
    TrainImages = 3,
    /// Synthetic images to test with.
    TestImages = 4,
    /// Synthetic vectors.
    Regression = 5,
    /// Synthetic tokens.
    Tokens = 6,
    /// The order of rows before some of them are taken.
    Rows = 7,
    /// The order of batches of samples of like length.
    Batches = 8,
}

/// The generator for one item. The index selects the ChaCha stream, and everything else is the key, so no two
/// combinations share numbers.
pub(crate) fn generator(seed: u64, purpose: RandomPurpose, epoch: u64, index: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    key[16] = purpose as u8;
    let mut generator = ChaCha8Rng::from_seed(key);
    generator.set_stream(index);
    generator
}

/// Overwrites `values` with numbers from the standard normal distribution.
pub(crate) fn fill_normal(generator: &mut ChaCha8Rng, values: &mut [f32]) {
    for value in values {
        *value = generator.sample(StandardNormal);
    }
}
