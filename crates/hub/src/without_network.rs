//! In place of what fetches in a build without the feature `network`.

use std::path::Path;

use paceline_failure::{Result, usage};

use crate::Wanted;
use crate::published::Source;

const MISSING: &str = "this build of paceline fetches nothing: build it with its feature `hub`";

/// Errors: this build fetches nothing.
pub fn fetch(_: Wanted, _: &str, _: Option<&str>, _: bool) -> Result<()> {
    usage(MISSING)
}

impl Source {
    /// Errors: this build fetches nothing.
    pub fn fetch(&self, _: &str, _: &Path, _: bool) -> Result<(), String> {
        Err(MISSING.to_owned())
    }
}
