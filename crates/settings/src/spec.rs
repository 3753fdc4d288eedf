//! The run specification: the settings that were stated, by flags or in a file.
//!
//! Defaults are filled in when it is resolved (`paceline_run::resolve`), so a default that depends on another setting
//! follows it. The keys are the names of the flags of `paceline train`, without dashes, whose definitions
//! ([`super::flags`]) decide which values a key accepts, from the command line, a file or a sweep.
//!
//! As JSON or TOML a specification is a table of keys and values:
//!
//! ```toml
//! model = "mlp"
//! hidden-dim = 64
//! batch-norm = false
//! channels = [16, 32]
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use clap::ArgMatches;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use paceline_choices::registry::typed_value;
use paceline_failure::outputs::write_json;
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::text::named;
use serde_json::{Map, Value};

use super::flags::{self, Comparison, Several};

/// The stated settings of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunSpec {
    /// The values of each key. A switch has one value, `true` or `false`.
    stated: BTreeMap<String, Vec<String>>,
}

impl RunSpec {
    /// The typed flags. Fails if a value is not UTF-8, which a file could not store.
    pub fn typed(matches: &ArgMatches) -> Result<Self> {
        let mut spec = Self::default();
        for flag in flags::all().iter() {
            let (id, key) = (flag.get_id().as_str(), flags::key(flag));
            let is_known = matches.try_contains_id(id).unwrap_or(false);
            if !is_known || matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let mut values = Vec::new();
            for raw in matches.get_raw(id).into_iter().flatten() {
                let value = raw.to_str().ok_or_else(|| {
                    Failure::Usage(format!(
                        "--{key} {}: this is not valid UTF-8, so {FILE_NAME} could not hold it; pass \
                         another name",
                        named(raw)
                    ))
                })?;
                values.push(value.to_owned());
            }
            spec.stated.insert(key.to_owned(), values);
        }
        Ok(spec)
    }

    /// Whether a key is stated.
    pub fn has(&self, key: &str) -> bool {
        self.stated.contains_key(key)
    }

    /// The values of a key, if it is stated.
    pub fn get(&self, key: &str) -> Option<&[String]> {
        self.stated.get(key).map(Vec::as_slice)
    }

    /// The value of a key that takes a number, if it is stated.
    pub fn number(&self, key: &str) -> Option<usize> {
        self.get(key)?.first()?.parse().ok()
    }

    /// The comparison whose flag names several strategies.
    pub fn comparison(&self) -> Option<(Comparison, Several)> {
        Comparison::EACH.into_iter().find_map(|of| {
            let choice = self.get(of.key())?.first()?;
            Some((of, Several::named(choice)?))
        })
    }

    /// All keys that are stated.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.stated.keys().map(String::as_str)
    }

    /// A copy without these keys.
    pub fn without(&self, keys: &[&str]) -> Self {
        let mut spec = self.clone();
        spec.stated.retain(|key, _| !keys.contains(&key.as_str()));
        spec
    }

    /// A copy with one value for a key, which replaces a stated one.
    pub fn with(&self, key: &str, value: impl ToString) -> Self {
        self.with_values(key, [value])
    }

    /// A copy with these values for a key, which replace stated ones.
    pub fn with_values(&self, key: &str, values: impl IntoIterator<Item = impl ToString>) -> Self {
        let mut spec = self.clone();
        let values = values.into_iter().map(|value| value.to_string()).collect();
        spec.stated.insert(key.to_owned(), values);
        spec
    }

    /// A copy with a value for a key, unless the key is stated already.
    pub fn with_default(&self, key: &str, value: impl ToString) -> Self {
        if self.has(key) { self.clone() } else { self.with(key, value) }
    }

    /// A copy with this value for a key, or without the key.
    pub fn set(&self, key: &str, value: Option<impl ToString>) -> Self {
        value.map_or_else(|| self.without(&[key]), |value| self.with(key, value))
    }

    /// The flags that state these settings, as words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let words = self.stated.iter().flat_map(|(key, values)| match values.as_slice() {
            [value] => vec![format!("--{key}={value}").into()],
            values => {
                let values = values.iter().map(OsString::from);
                std::iter::once(OsString::from(format!("--{key}"))).chain(values).collect()
            }
        });
        words.collect()
    }

    /// Checks each value by itself, and fills in defaults that do not depend on other settings.
    pub fn parse(&self) -> Result<ArgMatches> {
        self.checked().map_err(|(_, words)| Failure::Usage(words))
    }

    /// Like [`RunSpec::parse`]. An error has its key, if it is about one.
    pub(crate) fn checked(&self) -> std::result::Result<ArgMatches, (Option<String>, String)> {
        // As a word of its own, such a value would be another flag.
        let is_flag = |value: &&String| value.starts_with('-') && value.parse::<f64>().is_err();
        let lists = self.stated.iter().filter(|(_, values)| values.len() > 1);
        let mut found = lists.filter_map(|(key, values)| Some((key, values.iter().find(is_flag)?)));
        if let Some((key, value)) = found.next() {
            let words = format!(
                "--{key}: a value of a list cannot begin with a dash, as {value} does; leave it out"
            );
            return Err((Some(key.clone()), words));
        }
        let words = std::iter::once("paceline train".into()).chain(self.words());
        flags::command().try_get_matches_from(words).map_err(|error| {
            let flag = match error.get(ContextKind::InvalidArg) {
                Some(ContextValue::String(flag)) => flag.strip_prefix("--"),
                _ => None,
            };
            let key = flag.and_then(|flag| flag.split([' ', '=', '[']).next()).map(str::to_owned);
            (key, message(&error))
        })
    }

    /// Writes the specification to a file that can be read again.
    pub fn write(&self, disk: &Disk, path: &Path) -> Result<()> {
        write_json(disk, path, &self.to_json())
    }

    /// The specification as a table.
    pub fn to_json(&self) -> Map<String, Value> {
        let entry = |(key, values): (&String, &Vec<String>)| {
            let mut values = values.iter().map(|value| typed_value(value));
            let value = if flags::takes_list(key) {
                Value::Array(values.collect())
            } else {
                values.next().unwrap_or(Value::Bool(true))
            };
            (key.clone(), value)
        };
        self.stated.iter().map(entry).collect()
    }
}

/// The file of a run folder that stores the specification of the run.
pub const FILE_NAME: &str = "config.json";

/// The error message of the flag parser, without the usage lines.
pub fn message(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.trim_start_matches("error: ");
    let ends = ["\n\nUsage:", "\n\nFor more information"];
    let end = ends.iter().filter_map(|end| text.find(end)).min();
    let mut text = text[..end.unwrap_or(text.len())].trim_end().to_owned();
    for (of_parser, of_user) in NO_NUMBER {
        if let Some(start) = text.strip_suffix(of_parser) {
            text = format!("{start}{of_user}");
        }
    }
    if let (true, Some(ContextValue::String(value))) =
        (text.ends_with(NO_FRACTION), error.get(ContextKind::InvalidValue))
        && let Some(number) = with_a_point(value)
    {
        text = format!("{text} with a point, as in {number}");
    }
    text
}

/// A number with a decimal comma.
fn with_a_point(value: &str) -> Option<String> {
    let number = value.replacen(',', ".", 1);
    (number != value && number.parse::<f64>().is_ok()).then_some(number)
}

/// The message for a text that is not a number with a fraction.
const NO_FRACTION: &str = "pass a number";

/// The standard library's messages for a text that is not a number, with remedies.
const NO_NUMBER: [(&str, &str); 4] = [
    ("invalid digit found in string", "pass a whole number, without a sign"),
    ("cannot parse integer from empty string", "pass a whole number, without a sign"),
    ("number too large to fit in target type", "pass a smaller number"),
    ("invalid float literal", NO_FRACTION),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(flags: &str) -> RunSpec {
        let words = std::iter::once("x").chain(flags.split_whitespace());
        RunSpec::typed(&flags::command().try_get_matches_from(words).unwrap()).unwrap()
    }

    #[test]
    fn flags_become_words_that_mean_the_same() {
        let spec = typed("--name=-1 --channels 4 8 --pin-cores --model cnn --timeout=5");
        let words =
            ["--channels", "4", "8", "--model=cnn", "--name=-1", "--pin-cores=true", "--timeout=5"];
        assert_eq!(spec.words(), words);
        assert!(spec.has("pin-cores") && !spec.has("hidden"));
        assert_eq!((spec.number("timeout"), spec.number("hidden")), (Some(5), None));
        let changed = spec.without(&["channels", "name", "pin-cores"]).with("lr", 0.5);
        let changed = changed.with_default("timeout", 9).with_default("seed", 7);
        assert_eq!(changed.words(), ["--lr=0.5", "--model=cnn", "--seed=7", "--timeout=5"]);
    }

    #[test]
    fn defaults_are_not_stated() {
        assert_eq!(typed(""), RunSpec::default());
    }

    #[test]
    fn a_switch_can_be_turned_off() {
        assert_eq!(typed("--batch-norm=false").words(), ["--batch-norm=false"]);
        let matches = typed("--batch-norm=false").parse().unwrap();
        assert_eq!(matches.get_one("batch_norm"), Some(&false));
        let matches = typed("--batch-norm").parse().unwrap();
        assert_eq!(matches.get_one("batch_norm"), Some(&true));
    }

    #[test]
    fn a_table_has_numbers_switches_words_and_lists() {
        let spec = typed("--channels 4 --lr 0.50 --seed 7 --pin-cores --data-dir 12");
        let expected = serde_json::json!({
            "channels": [4], "data-dir": 12, "lr": "0.50", "pin-cores": true, "seed": 7
        });
        assert_eq!(Value::Object(spec.to_json()), expected);
    }
}
