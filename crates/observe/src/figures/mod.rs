//! Every figure of a run, defined once.
//!
//! | file | contents |
//! |---|---|
//! | [`event`] | the events of training, and the trait of listeners |
//! | [`facts`] | everything that is known about a run at its end |
//! | [`figure`], [`table`] | every figure: name, unit, definition, how it is computed and where it is shown |
//! | [`run_summary`] | the figures of a run that has ended, read from its summary |

pub mod event;
pub mod facts;
pub mod figure;
#[cfg(test)]
mod page_tests;
pub mod run_summary;
pub mod table;
