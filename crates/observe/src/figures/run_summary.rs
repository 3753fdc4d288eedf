//! Reads the summary of a run. Figures are read by name.

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::figures::table;

/// Keys that every summary has.
const REQUIRED: [&str; 6] =
    ["strategy", "world_size", "transport", "params", "steps", "weights_sha256"];

/// The most bytes of a summary. Its longest part is a line for each bucket, gather and rank.
const MAX_BYTES: u64 = 64 << 20;

/// The summary of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunSummary(Value);

impl RunSummary {
    /// Reads a summary from a file. Fails if the file is broken: cut off, not JSON, or without a required key.
    pub fn read(file: &Path) -> Result<Self> {
        let broken = |why: &dyn std::fmt::Display| {
            Failure::Run(format!("the summary {} is broken: {why}", file.printable()))
        };
        let text = match paceline_files::read_text(file, MAX_BYTES) {
            Err(error) if error.kind() != std::io::ErrorKind::InvalidData => {
                return Err(Failure::io(file.printable(), error));
            }
            text => text.map_err(|error| broken(&error))?,
        };
        let whole: Value = serde_json::from_str(&text).map_err(|error| broken(&error))?;
        match REQUIRED.iter().find(|name| whole.get(name).is_none_or(Value::is_null)) {
            Some(missing) => Err(broken(&format!("it has no {missing}"))),
            None => Ok(Self(whole)),
        }
    }

    /// A figure of the [table], from a summary of any version.
    pub fn number(&self, name: &str) -> Option<f64> {
        table::read(name, &self.0)
    }

    /// A count; zero if it is missing.
    pub fn count(&self, name: &str) -> u64 {
        self.0.get(name).and_then(Value::as_u64).unwrap_or(0)
    }

    /// A text; empty if it is missing.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// A table or a list; its default value if it is missing.
    pub fn part<T: DeserializeOwned + Default>(&self, name: &str) -> T {
        self.0.get(name).and_then(|part| T::deserialize(part).ok()).unwrap_or_default()
    }
}

impl From<Value> for RunSummary {
    fn from(whole: Value) -> Self {
        Self(whole)
    }
}
