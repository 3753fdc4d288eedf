//! What a run measures, and where its figures are shown.

pub mod anatomy;
pub mod console;
pub mod meter;
pub mod summary;
pub mod tensorboard;

pub use meter::{TOTAL, quantile};
