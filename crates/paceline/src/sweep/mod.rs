//! Sweeps: training runs that are made several times, interleaved, and compared.

pub mod execute;
pub mod presets;
