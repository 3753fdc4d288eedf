//! Configuration files: run specifications as TOML or JSON, and how flags override them.
//!
//! A file is a table of keys and values, or the `config.json` of a run folder. In the latter, only the table `stated` is
//! read, not `resolved`. Every key is checked by the definition of its flag. Error messages have the file and the line.
//!
//! Flags win over the file. A flag replaces its key and those it conflicts with; another choice also removes the keys that
//! only the file's choice reads. The `config.json` of a run folder does not decide where the next run writes or from where
//! it fetches ([`Scope`]).

use std::any::TypeId;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Arg;
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::{Registry, takes_list};
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::resources;
use serde_json::Value;
use strsim::levenshtein;

use super::flags::{self, Scope};
use super::spec::RunSpec;

/// The version of the files that are written and read.
pub const VERSION: u64 = 1;

/// A specification that was read from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecFile {
    /// The settings that the file states.
    pub spec: RunSpec,
    path: PathBuf,
    /// Whether it is the `config.json` of a run folder.
    is_of_run: bool,
    /// The line of each key, counted from 1.
    lines: BTreeMap<String, usize>,
}

/// The most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;

struct Problem {
    line: usize,
    words: String,
}

/// A key of the file with its value.
struct Entry {
    key: String,
    value: Value,
    line: usize,
}

impl SpecFile {
    /// Reads a file and [parses](Self::parse) it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = paceline_files::read_stream(path, MAX_BYTES)
            .map_err(|e| Failure::Usage(format!("--config {}: {e}", path.printable())))?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file: JSON if its name ends in `.json`, otherwise TOML.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        Self::parse_from(path, text, false)
    }

    /// Reads the settings in a checkpoint's index, which has this path. Fails for a flag that no checkpoint records, since
    /// it may come from a stranger.
    pub fn parse_of_checkpoint(path: &Path, text: &str) -> Result<Self> {
        Self::parse_from(path, text, true)
    }

    fn parse_from(path: &Path, text: &str, is_of_checkpoint: bool) -> Result<Self> {
        let fail = |Problem { line, words }: Problem| {
            Failure::Usage(format!("{}:{line}: {}", path.printable(), printable(&words)))
        };
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let (entries, has_stated) = if is_json { json(text) } else { toml(text) }.map_err(fail)?;
        // Without the table `stated`, a stranger's file of this name would state any flag.
        let is_of_run = has_stated || path.file_name().is_some_and(|name| name == "config.json");
        let known = flags::all();
        let (mut spec, mut lines) = (RunSpec::default(), BTreeMap::new());
        for Entry { key, value, line } in entries {
            let at = |problem: String| {
                Failure::Usage(format!("{}:{line}: {}", path.printable(), printable(&problem)))
            };
            let normal = key.replace('_', "-");
            let flag = known.iter().find(|flag| flags::key(flag) == normal);
            let flag = flag.ok_or_else(|| at(unknown(&key, &known)))?;
            if is_of_checkpoint && Scope::of(flag) == Scope::Host {
                continue; // earlier versions recorded these too
            }
            if is_of_checkpoint && !Scope::of(flag).is_recorded() {
                return Err(at(format!(
                    "it states --{normal}, which is not for a checkpoint to decide, so no run has written it; pass another \
                     checkpoint"
                )));
            }
            if lines.contains_key(&normal) {
                return Err(at(format!("{normal} is stated twice; leave one of the two out")));
            }
            let values = values(flag, &key, &value).map_err(at)?;
            spec = spec.with_values(&normal, values);
            lines.insert(normal, line);
        }
        let file = Self { spec, path: path.to_owned(), is_of_run, lines };
        file.spec.checked().map_err(|(key, words)| file.problem(key.as_deref(), &words))?;
        Ok(file)
    }

    /// An error with the line and the value of a key.
    fn problem(&self, key: Option<&str>, words: &str) -> Failure {
        let words = words.split('\n').map(str::trim).filter(|part| !part.is_empty());
        let words = printable(&words.collect::<Vec<_>>().join("; ")).into_owned();
        let (path, line) = (self.path.printable(), key.and_then(|key| self.lines.get(key)));
        Failure::Usage(match (key, line) {
            (Some(key), Some(line)) => {
                let values = self.spec.get(key).unwrap_or_default().join(" ");
                format!("{path}:{line}: {key} = {}: {words}", printable(&values))
            }
            _ => format!("{path}: {words}"),
        })
    }

    /// The file without keys that a command cannot use.
    pub fn keeping(mut self, is_kept: impl Fn(&str) -> bool) -> Self {
        let dropped: Vec<String> =
            self.spec.keys().filter(|key| !is_kept(key)).map(str::to_owned).collect();
        let dropped: Vec<&str> = dropped.iter().map(String::as_str).collect();
        self.spec = self.spec.without(&dropped);
        self
    }

    /// The file with its specification changed.
    pub fn with(self, change: impl FnOnce(&RunSpec) -> RunSpec) -> Self {
        Self { spec: change(&self.spec), ..self }
    }

    /// Adds `flags` to the specification. Also returns a note for each replaced setting of the file.
    pub fn overlaid(&self, flags: &RunSpec) -> Result<(RunSpec, Vec<String>)> {
        let mut spec = self.spec.clone();
        let mut notes = Vec::new();
        let is_repeated = |key: &&str| Scope::of_key(key).is_some_and(Scope::is_repeated);
        for key in self.spec.keys().filter(|key| self.is_of_run && !is_repeated(key)) {
            spec = spec.without(&[key]);
            if !flags.has(key) {
                notes.push(format!(
                    "{} is left out: a run folder does not state the files and addresses of another run; pass --{key} if you want the \
                     same",
                    self.place(key)
                ));
            }
        }
        let most = resources::num_cores() * flags::RANKS_PER_CORE;
        if self.is_of_run && !flags.has("nproc") && spec.number("nproc").is_some_and(|n| n > most) {
            let place = self.place("nproc");
            return Err(Failure::Usage(format!(
                "{place}: without --nproc, a run folder starts at most {most} ranks on this machine; pass --nproc N"
            )));
        }
        let known = flags::command();
        for key in flags.keys() {
            let values = flags.get(key).unwrap_or_default();
            if spec.get(key).is_some_and(|theirs| theirs != values) {
                notes.push(self.note(key, key, flags));
            }
            let flag = known.get_arguments().find(|flag| flags::key(flag) == key);
            let rivals = flag.map(|flag| rivals(&known, flag)).unwrap_or_default();
            let rivals = rivals.iter().map(String::as_str).filter(|rival| !flags.has(rival));
            let rivals: Vec<&str> = rivals.collect();
            for rival in rivals.iter().filter(|rival| spec.has(rival)) {
                notes.push(self.note(key, rival, flags));
            }
            spec = spec.without(&rivals).with_values(key, values);
        }
        // `--synthetic` means `--data synthetic`.
        let names_data = flags.has(DATA_SETS.key) || flags.has("synthetic");
        self.drop_foreign(&MODELS, flags.has(MODELS.key), flags, &mut spec, &mut notes)?;
        self.drop_foreign(&DATA_SETS, names_data, flags, &mut spec, &mut notes)?;
        let names_optimizer = flags.has(OPTIMIZERS.key);
        self.drop_foreign(&OPTIMIZERS, names_optimizer, flags, &mut spec, &mut notes)?;
        let names_strategy = flags.has(STRATEGIES.key);
        self.drop_foreign(&STRATEGIES, names_strategy, flags, &mut spec, &mut notes)?;
        Ok((spec, notes))
    }

    /// Removes the file's keys that do not apply to the choice that a flag names.
    fn drop_foreign<K>(
        &self,
        registry: &Registry<K>,
        is_named: bool,
        flags: &RunSpec,
        spec: &mut RunSpec,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        if !is_named {
            return Ok(());
        }
        let name = flags.get(registry.key).and_then(<[String]>::first);
        let name = name.map_or(registry.default_name(), String::as_str);
        for key in registry.foreign_to(registry.get(name)?) {
            if self.spec.has(&key) && !flags.has(&key) {
                notes.push(format!(
                    "{} is left out: it does not apply to --{} {name}",
                    self.place(&key),
                    registry.key
                ));
                *spec = spec.without(&[&key]);
            }
        }
        Ok(())
    }

    fn note(&self, key: &str, displaced: &str, flags: &RunSpec) -> String {
        let value = flags.get(key).unwrap_or_default().join(" ");
        format!("--{key} {value} takes the place of {}", self.place(displaced))
    }

    /// A key of the file, with its value and its line, for notes.
    fn place(&self, key: &str) -> String {
        let value = self.spec.get(key).unwrap_or_default().join(" ");
        let line = self.lines.get(key).copied().unwrap_or_default();
        format!("{key} = {value} ({}:{line})", self.path.printable())
    }
}

/// The sizes that `--llama-size` states by one name. The vocabulary is that of the tokenizer.
const SIZES: [&str; 5] = ["heads", "intermediate", "kv-heads", "layers", "width"];

/// The keys that conflict with a flag, or that it states too.
fn rivals(command: &clap::Command, flag: &Arg) -> Vec<String> {
    let conflicts_with = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|rival| rival.get_id() == other.get_id())
    };
    let all = command.get_arguments().filter(|other| other.get_id() != flag.get_id());
    let states =
        |other: &Arg| flags::key(flag) == "llama-size" && SIZES.contains(&flags::key(other));
    // Only one of two conflicting flags names the other.
    all.filter(|other| conflicts_with(flag, other) || conflicts_with(other, flag) || states(other))
        .map(|other| flags::key(other).to_owned())
        .collect()
}

/// The entries of a TOML file.
fn toml(text: &str) -> std::result::Result<(Vec<Entry>, bool), Problem> {
    let line_of = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let table = toml::de::DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(span.start));
        Problem { line, words: error.message().to_owned() }
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.into_inner() {
        let line = line_of(key.span().start);
        let value = toml_value(value.into_inner())
            .ok_or_else(|| Problem { line, words: not_a_value(key.get_ref()) })?;
        entries.push(Entry { key: key.into_inner().into_owned(), value, line });
    }
    stated(entries)
}

/// Converts a scalar or a list to JSON; `None` for other values. A number keeps the digits of the file.
fn toml_value(value: toml::de::DeValue<'_>) -> Option<Value> {
    use toml::de::DeValue;
    match value {
        DeValue::String(text) => Some(Value::String(text.into_owned())),
        DeValue::Boolean(value) => Some(Value::Bool(value)),
        // The text of the number lacks its prefix: 0x10 is 16.
        DeValue::Integer(number) if number.radix() != 10 => {
            let digits = number.as_str().replace('_', "");
            let value = u64::from_str_radix(&digits, number.radix()).map(Value::from);
            Some(value.unwrap_or_else(|_| Value::String(number.to_string())))
        }
        DeValue::Integer(number) => number_value(number.as_str()),
        DeValue::Float(number) => number_value(number.as_str()),
        DeValue::Array(values) => {
            let values = values.into_iter().map(|value| toml_value(value.into_inner()));
            values.collect::<Option<Vec<_>>>().map(Value::Array)
        }
        DeValue::Datetime(_) | DeValue::Table(_) => None,
    }
}

fn number_value(digits: &str) -> Option<Value> {
    let digits = digits.replace('_', "");
    let digits = digits.trim_start_matches('+');
    serde_json::from_str(digits).ok().or_else(|| Some(Value::String(digits.to_owned())))
}

/// The entries of a JSON file.
fn json(text: &str) -> std::result::Result<(Vec<Entry>, bool), Problem> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| Problem { line: error.line(), words: error.to_string() })?;
    let Value::Object(table) = value else {
        return Err(Problem {
            line: 1,
            words: "a configuration is a table of keys and values".into(),
        });
    };
    // The table `stated` comes before the table `resolved`, which may have the same keys.
    let begin = text.find("\"stated\"").unwrap_or(0);
    let line_of = |key: &str| {
        let quoted = format!("\"{key}\"");
        let at =
            text[begin..].find(&quoted).map_or_else(|| text.find(&quoted), |at| Some(begin + at));
        text[..at.unwrap_or(0)].matches('\n').count() + 1
    };
    let entries = table.into_iter().map(|(key, value)| {
        let line = line_of(&key);
        Entry { key, value, line }
    });
    let (entries, is_of_run) = stated(entries.collect())?;
    let located = entries.into_iter().map(|entry| Entry { line: line_of(&entry.key), ..entry });
    Ok((located.collect(), is_of_run))
}

/// The entries of the table `stated` if the file is of a run folder, otherwise all; and whether it is such a file.
fn stated(entries: Vec<Entry>) -> std::result::Result<(Vec<Entry>, bool), Problem> {
    let (mut all, mut is_of_run) = (Vec::new(), false);
    for Entry { key, value, line } in entries {
        match (key.as_str(), value) {
            ("version", version) if version.as_u64() == Some(VERSION) => {}
            ("version", version) => {
                let words = format!(
                    "this is a configuration of version {version}, and this program reads version \
                     {VERSION}"
                );
                return Err(Problem { line, words });
            }
            ("resolved", _) => {}
            ("stated", Value::Object(table)) => {
                is_of_run = true;
                all.extend(table.into_iter().map(|(key, value)| Entry { key, value, line }));
            }
            (_, value) => all.push(Entry { key, value, line }),
        }
    }
    Ok((all, is_of_run))
}

fn unknown(key: &str, known: &[Arg]) -> String {
    let nearest =
        known.iter().map(flags::key).min_by_key(|name| levenshtein(&key.replace('_', "-"), name));
    let hint = nearest.map_or(String::new(), |name| format!("; the nearest key is {name}"));
    format!("there is no key {key}{hint}")
}

fn not_a_value(key: &str) -> String {
    format!("{key}: a setting is a number, a text, true or false, or a list of these")
}

/// The values of a key as words. Fails if they are not of the type that its flag takes.
fn values(flag: &Arg, key: &str, value: &Value) -> std::result::Result<Vec<String>, String> {
    let word = |value: &Value| match value {
        Value::String(text) if takes_no_text(flag) && !is_special_number(text) => Err(format!(
            "{key} = {value}: this is a text, and --{} takes {}",
            flags::key(flag),
            what(flag)
        )),
        Value::String(text) => Ok(text.clone()),
        Value::Bool(_) | Value::Number(_) => Ok(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => Err(not_a_value(key)),
    };
    match value {
        Value::Array(values) if values.is_empty() => {
            Err(format!("{key} = []: pass at least one value, or leave the key out"))
        }
        Value::Array(values) if values.len() > 1 && !takes_list(flag) => {
            Err(format!("{key} = {value}: pass one value"))
        }
        Value::Array(values) => values.iter().map(word).collect(),
        value => Ok(vec![word(value)?]),
    }
}

fn is_of<T: 'static>(flag: &Arg) -> bool {
    flag.get_value_parser().type_id() == TypeId::of::<T>()
}

fn takes_no_text(flag: &Arg) -> bool {
    is_of::<bool>(flag) || is_of::<usize>(flag) || is_of::<u64>(flag) || is_of::<f64>(flag)
}

fn what(flag: &Arg) -> &'static str {
    if is_of::<bool>(flag) { "true or false" } else { "a number" }
}

/// Whether a text is a number, kept as text because JSON would lose it or its digits.
fn is_special_number(text: &str) -> bool {
    text.parse::<f64>().is_ok()
}
