//! A run of `paceline train`.
//!
//! | file | what it holds |
//! |---|---|
//! | [`folder`] | the folder that a run writes to |

pub mod folder;
