//! `summary.json`: the results of a run. A view of the table of figures.

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::{write_json, write_stated_json};
use paceline_host::disk::Disk;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::figures::event::{Event, Listener};
use crate::figures::figure::Figure;
use crate::figures::table::TABLE;

/// Values by name, in this order.
pub(super) struct Named(pub(super) Vec<(&'static str, Value)>);

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, rounded(value))))
    }
}

/// A value with twelve digits of each fraction: all that a clock and a sum of losses have, without what binary fractions add.
fn rounded(value: &Value) -> Value {
    let fraction = value.as_f64().filter(|exact| exact.fract() != 0.0);
    match (value, fraction.map(|exact| format!("{exact:.11e}").parse::<f64>())) {
        (_, Some(Ok(rounded))) => rounded.into(),
        (Value::Array(values), _) => values.iter().map(rounded).collect(),
        (Value::Object(of), _) => of.iter().map(|(key, of)| (key.clone(), rounded(of))).collect(),
        _ => value.clone(),
    }
}

/// `summary.json`, and the copy that `--json` asks for.
#[derive(Debug)]
pub struct SummaryFile {
    disk: Disk,
    /// The file in the run folder.
    own: Option<PathBuf>,
    copy: Option<PathBuf>,
}

impl SummaryFile {
    /// Writes the summary to the run folder, if there is one, and to `copy`, if that is given.
    pub fn new(disk: Disk, folder: Option<&Path>, copy: Option<&Path>) -> Self {
        let own = folder.map(|folder| folder.join("summary.json"));
        Self { disk, own, copy: copy.map(Path::to_owned) }
    }
}

impl Listener for SummaryFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        let Event::Ended(facts) = event else { return Ok(()) };
        // Null if no step was measured.
        let value = |figure: &Figure| figure.of_run(facts).unwrap_or_default();
        let shown = TABLE.iter().filter(|figure| figure.in_summary);
        let summary = Named(shown.map(|figure| (figure.name, value(figure))).collect());
        if let Some(own) = &self.own {
            // A run with a summary has come to its end, or says where it was stopped, so the file is complete or not there.
            write_json(&self.disk, own, &summary)?;
        }
        self.copy.as_ref().map_or(Ok(()), |copy| write_stated_json(&self.disk, copy, &summary))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fractions_are_rounded_and_counts_are_not() {
        let values = [
            (json!(2.7526639999999998), "2.752664"),
            (json!(-0.0020469999999999998), "-0.002047"),
            (json!(3e-11), "3e-11"),
            (json!(12_345_678_912.0), "12345678912.0"),
            (json!(u64::MAX), "18446744073709551615"),
            (
                json!({ "ops": [{ "done_ms": 94.62392299999999 }, null, "x"] }),
                r#"{"ops":[{"done_ms":94.623923},null,"x"]}"#,
            ),
        ];
        for (value, expected) in values {
            let line = serde_json::to_string(&Named(vec![("of", value)])).unwrap();
            assert_eq!(line, format!("{{\"of\":{expected}}}"));
        }
    }
}
