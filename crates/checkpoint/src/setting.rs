//! A setting that a checkpoint records, and the error message for a run that has another value.

/// A setting that must be the same for a run to continue as if it had never stopped.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Its key in the metadata.
    pub key: String,
    /// The flag that sets it, if there is one.
    pub name: String,
    /// Its value in this run.
    pub value: String,
    /// The fault that another value would cause, for the error message.
    pub otherwise: &'static str,
    /// The user's remedy for another value, for the error message.
    pub fix: String,
    /// Whether a run with another value can go on, with a warning.
    pub may_differ: bool,
}

impl Setting {
    /// A setting that a flag sets. Its key is the name of the flag without dashes.
    pub fn of_flag(flag: &str, value: impl ToString, otherwise: &'static str) -> Self {
        Self {
            key: flag.trim_start_matches('-').to_owned(),
            name: flag.to_owned(),
            value: value.to_string(),
            otherwise,
            fix: format!("pass the same {flag}"),
            may_differ: false,
        }
    }

    /// The same, but a run with another value goes on with a warning.
    pub fn that_may_differ(self) -> Self {
        Self { may_differ: true, ..self }
    }

    /// Why a checkpoint that was written with `theirs` cannot be continued, or not as if the run had never stopped.
    pub fn refusal(&self, theirs: Option<&str>) -> String {
        let Setting { key, name, value, otherwise, fix, .. } = self;
        let theirs = match theirs {
            Some(theirs) => format!("was written with {}", format!("{name} {theirs}").trim_start()),
            None => format!("does not say its {key}, like those of earlier builds"),
        };
        format!("it {theirs}, this run has {value}; {otherwise}: {fix}")
    }
}
