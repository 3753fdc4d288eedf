//! Initial values of parameters, which depend only on a seed and on the numbers of a parameter and its element.

use std::ops::Range;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The initial values of a parameter.
///
/// ```
/// use paceline_model::Init;
///
/// assert_eq!(Init::fan_in(4), Init::Uniform { bound: 0.5 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// The largest absolute value.
        bound: f64,
    },
    /// Normal around zero.
    Normal {
        /// The standard deviation.
        std: f64,
    },
    /// The same value everywhere.
    Constant(f64),
}

impl Init {
    /// PyTorch's initialization of weights and biases of linear and convolution layers: uniform with the
    /// bound `1 / sqrt(inputs)`, where `inputs` is the number of inputs of each output.
    pub fn fan_in(inputs: usize) -> Self {
        Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() }
    }
}

/// The initial values of these elements of a whole parameter.
pub(crate) fn values_of(
    init: Init,
    seed: u64,
    stream: u64,
    elems: Range<usize>,
) -> impl Iterator<Item = f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    // An element takes two words of the stream. Normal values come in pairs.
    let begin = elems.start - elems.start % 2;
    rng.set_word_pos(2 * begin as u128);
    let mut second = None;
    let values = (begin..elems.end).map(move |_| match init {
        Init::Uniform { bound } => (rng.random::<f64>() * 2.0 - 1.0) * bound,
        Init::Normal { std } => second.take().unwrap_or_else(|| {
            // By Box and Muller. One minus a number in [0, 1) is never zero.
            let (radius, turn) = (1.0 - rng.random::<f64>(), rng.random::<f64>());
            let radius = std * (-2.0 * radius.ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * turn).sin_cos();
            second = Some(radius * sin);
            radius * cos
        }),
        Init::Constant(value) => value,
    });
    values.skip(elems.start - begin)
}
