//! What the figures of a run mean, and what to do about them.
//!
//! | file | what it answers |
//! |---|---|
//! | [`replay`] | when would buckets be done, with other sizes or on another link? |
//! | [`advice`] | is communication hidden, and if not, what would change that? |

pub mod advice;
pub mod replay;
