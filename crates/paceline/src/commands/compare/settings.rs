//! Finds the settings in which runs differ, from their `config.json`. Knows no setting by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use paceline_run::agreement::words;
use paceline_settings::flags::Scope;
use paceline_table::table::Cell;
use serde_json::Value;

use super::load::Run;

/// Settings by name. The name of a setting in a table has the table's name and a dot in front, as in
/// `strategy.name`. `None` is a setting, or a table, that the run goes without.
pub(super) type Settings = BTreeMap<String, Option<String>>;

/// Whether a setting is about the output of a run or its folder, which do not influence its result.
fn is_output(name: &str) -> bool {
    let scope = Scope::of_key(&name.replace('_', "-"));
    name == "warnings" || matches!(scope, Some(Scope::Output | Scope::Places))
}

/// The most bytes of a configuration. That of a run has a few thousand.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a configuration: all settings, and the stated flags, which are among them. Without one there are none.
pub(super) fn read(file: &Path) -> [Settings; 2] {
    let text = paceline_files::read_text(file, MAX_BYTES).unwrap_or_default();
    let config = serde_json::from_str::<Value>(&text).unwrap_or_default();
    ["resolved", "stated"].map(|part| {
        let mut settings = Settings::new();
        let whole = config[part].as_object().into_iter().flatten();
        for (name, value) in whole.filter(|(name, _)| !is_output(name)) {
            flatten(name, value, &mut settings);
        }
        settings
    })
}

fn flatten(name: &str, value: &Value, settings: &mut Settings) {
    match value {
        Value::Object(table) => {
            table.iter().for_each(|(part, of)| flatten(&format!("{name}.{part}"), of, settings));
        }
        other => {
            settings.insert(name.to_owned(), (!other.is_null()).then(|| words(other)));
        }
    }
}

/// The settings that are not the same in all runs: each with its value in every run, if it has one.
pub(super) fn different(runs: &[Run]) -> Vec<(String, Vec<Option<String>>)> {
    let known = || runs.iter().map(|run| &run.settings).filter(|settings| !settings.is_empty());
    let names: BTreeSet<&String> = known().flat_map(|settings| settings.keys()).collect();
    let differs = |name: &&String| {
        let mut values = known().filter(|settings| knows(settings, name)).map(|of| value(of, name));
        let first = values.next().flatten();
        values.any(|value| value != first)
    };
    let values =
        |name: &String| runs.iter().map(|run| value(&run.settings, name).cloned()).collect();
    names.into_iter().filter(differs).map(|name| (name.clone(), values(name))).collect()
}

/// The flags that a run states and whose values differ between the runs: each with its value in every run.
pub(super) fn flags(runs: &[Run]) -> Vec<(String, Vec<Cell>)> {
    let names: BTreeSet<&String> = runs.iter().flat_map(|run| run.stated.keys()).collect();
    let of_run = |run: &Run, flag: &str| {
        let name = flag.replace('-', "_");
        let (end, table) = (format!(".{name}"), format!("{name}.name"));
        let is_it = |key: &&String| **key == name || **key == table || key.ends_with(&end);
        let resolved = run.settings.keys().find(is_it).and_then(|key| value(&run.settings, key));
        Cell::from(resolved.or_else(|| value(&run.stated, flag)).map(String::as_str))
    };
    let values = |flag: &String| runs.iter().map(|run| of_run(run, flag)).collect::<Vec<_>>();
    let all = names.into_iter().map(|flag| (flag.clone(), values(flag)));
    all.filter(|(_, values)| values.iter().any(|value| *value != values[0])).collect()
}

fn value<'a>(settings: &'a Settings, name: &str) -> Option<&'a String> {
    settings.get(name)?.as_ref()
}

/// Whether the version of the program that wrote these settings knows the setting of this name: it may name it otherwise. A run
/// lacks the settings of another choice, those without a value of its own choice, and those in a table that it goes without.
fn knows(settings: &Settings, name: &str) -> bool {
    let mut tables = name.match_indices('.').map(|(end, _)| &name[..end]);
    settings.contains_key(name)
        || tables.any(|table| {
            settings.contains_key(table) || settings.contains_key(&format!("{table}.name"))
        })
}
