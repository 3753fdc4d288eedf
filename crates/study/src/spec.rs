//! The changes that a sweep makes to the specification of a run: it changes settings by name, and makes
//! the command that starts the run.

use std::ffi::OsString;
use std::path::Path;

use clap::Arg;
use paceline_failure::{Failure, Result};
use paceline_files::printable;
use paceline_host::disk::Disk;
use paceline_run::resolve::resolve_inputs;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{self, Scope};
use paceline_settings::spec::RunSpec;
use strsim::levenshtein;

use crate::flags::is_swept;

/// The specification of a run.
pub type Spec = RunSpec;

/// The value of a varied setting that means to leave the setting out.
pub const LEFT_OUT: &str = "default";

/// The setting of a run of the user's own program, in place of all others: the flags of `paceline __steps`, `--`, and the
/// program's words.
pub const PROGRAM: &str = "program";

/// Resolves a specification and checks all of it, before anything starts.
pub fn resolve(spec: &Spec) -> Result<TrainConfig> {
    let (config, _data) = resolve_inputs(spec, None)?;
    Ok(config)
}

/// Each flag that is set, with its values as text.
pub fn settings(spec: &Spec) -> Vec<(String, String)> {
    let words = |key| spec.get(key).unwrap_or_default().join(" ");
    spec.keys().map(|key| (format!("--{key}"), words(key))).collect()
}

/// Whether a run prints its progress. Otherwise it prints nothing but errors.
pub fn prints(spec: &Spec) -> bool {
    spec.has("log-every")
}

/// The arguments of `paceline` that start this run and write its summary to a file. This writes the run's
/// specification to a file beside the summary.
pub fn arguments(disk: &Disk, spec: &Spec, summary: &Path) -> Result<Vec<OsString>> {
    let flag = |name: &str, value: &Path| {
        let mut word = OsString::from(format!("--{name}="));
        word.push(value);
        word
    };
    if let Some(words) = spec.get(PROGRAM) {
        let own = ["__steps".into(), flag("json", summary)];
        return Ok(own.into_iter().chain(words.iter().map(OsString::from)).collect());
    }
    // Not the name of a run folder's configuration, which does not state files, addresses and output.
    let file = summary.with_file_name("flags.json");
    spec.write(disk, &file)?;
    let quiet = (!prints(spec)).then(|| "--quiet".into());
    let words = ["train".into(), flag("config", &file), flag("json", summary)];
    Ok(words.into_iter().chain(quiet).collect())
}

/// The specification as a command line that a user would type.
pub fn shown(spec: &Spec) -> String {
    if let Some(words) = spec.get(PROGRAM) {
        let words = words.iter().filter(|word| *word != "--throughput=");
        let words = words.map(String::as_str).collect::<Vec<_>>().join(" ");
        return format!("paceline bench scaling {}", printable(&words));
    }
    let words = spec.words().into_iter().map(|word| word.to_string_lossy().into_owned());
    ["paceline train".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// Fails for a key that is not the name of a setting, or of a setting that cannot be varied. The error
/// suggests the most similar name.
pub fn check_key(flag: &str, key: &str) -> Result<()> {
    let all = flags::all();
    let known = all.iter().find(|known| flags::key(known) == key);
    let is_comparison = |flag: &Arg| flag.get_help_heading() == Some("Comparison");
    let why = match known.map(Scope::of) {
        _ if known.is_some_and(is_swept) => return Ok(()),
        Some(Scope::Checkpoints) => "runs of several rounds would read and write the same files",
        Some(Scope::Output) if known.is_some_and(is_comparison) => "vary strategy",
        Some(_) => "the sweep decides about the output of its runs",
        None if ["config", "recipe"].contains(&key) => "all runs start from one configuration",
        None => {
            let nearest = all.iter().map(flags::key).min_by_key(|known| levenshtein(key, known));
            let hint = nearest.map_or(String::new(), |name| format!("; the nearest one is {name}"));
            let key = printable(key);
            return Err(Failure::Usage(format!(
                "{flag} {key}: paceline train has no flag --{key}{hint}"
            )));
        }
    };
    Err(Failure::Usage(format!("{flag} {key}: it cannot be varied: {why}")))
}

/// The specification with a setting changed to `alternative`. Values of a list are separated by spaces; a
/// switch is `true` or `false`.
pub fn with(spec: &Spec, key: &str, alternative: &str) -> Result<Spec> {
    if alternative == LEFT_OUT {
        return Ok(spec.without(&[key]));
    }
    let values = if flags::takes_list(key) {
        alternative.split_whitespace().collect()
    } else {
        vec![alternative]
    };
    let spec = spec.with_values(key, values);
    let refused = |e: Failure| Failure::Usage(format!("{key}={}: {e}", printable(alternative)));
    spec.parse().map_err(refused)?;
    Ok(spec)
}
