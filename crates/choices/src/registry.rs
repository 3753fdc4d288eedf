//! A registry: the choices that one flag can name, and the flags that each choice adds.
//!
//! A program adds its own choices before it reads its command line (`paceline::Program`). Registries are static, because
//! `clap` passes nothing to the code that defines flags. Choices are only added, so a name always means the same one.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use paceline_failure::{Failure, Result, numbers};
use serde_json::{Map, Value};

/// Something that a flag can name.
pub struct Choice<K> {
    /// Its name on the command line and in files.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// One line of help.
    pub about: &'static str,
    /// The flags that it reads in addition to those of every run. Two choices may share a flag.
    pub flags: fn() -> Vec<Arg>,
    /// How the flags are read, and whatever else only this kind of choice has.
    pub of: K,
}

impl<K> Choice<K> {
    fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }
}

/// Words that mean every choice, and a flag that is left out.
const RESERVED: [&str; 2] = ["all", "default"];

/// The choices that one flag can name. If the flag has a default, it is the first choice.
pub struct Registry<K: 'static> {
    /// The flag, without dashes.
    pub key: &'static str,
    /// The heading of flags that state no heading.
    heading: &'static str,
    /// The choices that paceline comes with.
    built_in: &'static [&'static Choice<K>],
    /// The program's own choices, with their types.
    added: RwLock<Vec<(TypeId, &'static Choice<K>)>>,
}

impl<K> Registry<K> {
    /// A registry of these choices for `--key`, under `heading` in the help.
    pub const fn new(
        key: &'static str,
        heading: &'static str,
        built_in: &'static [&'static Choice<K>],
    ) -> Self {
        Self { key, heading, built_in, added: RwLock::new(Vec::new()) }
    }

    /// The choices that the program adds.
    pub fn added(&self) -> Vec<&'static Choice<K>> {
        let added = self.added.read().unwrap_or_else(PoisonError::into_inner);
        added.iter().map(|(_, choice)| *choice).collect()
    }

    /// Whether the choice of this type has been added.
    pub fn has(&self, of_type: TypeId) -> bool {
        let added = self.added.read().unwrap_or_else(PoisonError::into_inner);
        added.iter().any(|(known, _)| *known == of_type)
    }

    /// How many choices there are.
    pub fn num_choices(&self) -> usize {
        self.built_in.len() + self.added().len()
    }

    /// All choices, in the order of the help.
    pub fn all(&self) -> Vec<&'static Choice<K>> {
        self.built_in.iter().copied().chain(self.added()).collect()
    }

    /// Adds a choice, unless that of this type is there. Fails for a name that is taken or unusable.
    pub fn add(&self, choice: Choice<K>, of_type: TypeId) -> Result<()> {
        let mut added = self.added.write().unwrap_or_else(PoisonError::into_inner);
        if added.iter().any(|(known, _)| *known == of_type) {
            return Ok(());
        }
        let (key, name) = (self.key, choice.name);
        // The name becomes a part of file names and of lists.
        let is_word = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if name.is_empty() || !name.chars().all(is_word) || RESERVED.contains(&name) {
            return Err(Failure::Usage(format!(
                "this program adds --{key} '{name}', which is not a possible name; a name has letters, digits, _ and \
                 -, and is none of {}",
                RESERVED.join(", ")
            )));
        }
        let mut known = self.built_in.iter().chain(added.iter().map(|(_, choice)| choice));
        if let Some(known) = known.find(|known| known.has_name(name)) {
            return Err(Failure::Usage(format!(
                "this program adds --{key} {name}, and there is one of this name already ({}); give it another \
                 name",
                known.about
            )));
        }
        added.push((of_type, Box::leak(Box::new(choice))));
        Ok(())
    }

    /// The choice with this name or alias. Fails for an unknown name.
    pub fn get(&self, name: &str) -> Result<&'static Choice<K>> {
        self.all().into_iter().find(|choice| choice.has_name(name)).ok_or_else(|| {
            let names: Vec<&str> = self.all().iter().map(|choice| choice.name).collect();
            Failure::Usage(format!("--{} {name}: pass one of {}", self.key, names.join(", ")))
        })
    }

    /// The name of the default choice, if the flag has a default.
    pub fn default_name(&self) -> &'static str {
        self.built_in[0].name
    }

    /// The names, with their help.
    pub fn values(&self) -> impl Iterator<Item = PossibleValue> {
        self.all().into_iter().map(|choice| {
            PossibleValue::new(choice.name).aliases(choice.aliases).help(choice.about)
        })
    }

    /// The `clap` parser that accepts the names.
    pub fn parser(&self) -> PossibleValuesParser {
        PossibleValuesParser::new(self.values())
    }

    /// The flags of all choices, each once.
    pub fn flags(&self) -> Vec<Arg> {
        let mut flags: Vec<Arg> = Vec::new();
        for flag in self.all().iter().flat_map(|choice| (choice.flags)()) {
            if flags.iter().all(|known| known.get_id() != flag.get_id()) {
                let has_heading = flag.get_help_heading().is_some();
                flags.push(if has_heading { flag } else { flag.help_heading(self.heading) });
            }
        }
        flags
    }

    /// The flags, without dashes, that some choice reads but `chosen` does not.
    pub fn foreign_to(&self, chosen: &Choice<K>) -> BTreeSet<String> {
        let names = |flags: Vec<Arg>| -> BTreeSet<String> {
            flags.iter().filter_map(|flag| flag.get_long().map(str::to_owned)).collect()
        };
        &names(self.flags()) - &names((chosen.flags)())
    }

    /// The names of the choices that read a flag.
    pub fn readers(&self, flag: &str) -> Vec<&'static str> {
        let reads = |choice: &&'static Choice<K>| {
            (choice.flags)().iter().any(|own| own.get_long() == Some(flag))
        };
        self.all().into_iter().filter(reads).map(|choice| choice.name).collect()
    }
}

/// Whether a flag takes several values.
pub fn takes_list(flag: &Arg) -> bool {
    let is_repeated = matches!(flag.get_action(), ArgAction::Append);
    is_repeated || flag.get_num_args().is_some_and(|num| num.max_values() > 1)
}

/// The values of the flags that a choice reads, without those that have neither a value nor a default.
#[derive(Clone, Debug)]
pub struct FlagValues(Vec<FlagValue>);

#[derive(Clone, Debug)]
struct FlagValue {
    field: String,
    flag: String,
    is_list: bool,
    words: Vec<String>,
}

impl FlagValues {
    /// The values of the flags of `choice` in a run's settings.
    pub fn of<K>(choice: &Choice<K>, settings: &ArgMatches) -> Self {
        let value = |flag: Arg| {
            let words = settings.get_raw(flag.get_id().as_str())?;
            Some(FlagValue {
                field: flag.get_id().to_string(),
                flag: format!("--{}", flag.get_long().unwrap_or(flag.get_id().as_str())),
                is_list: takes_list(&flag),
                words: words.map(|word| word.to_string_lossy().into_owned()).collect(),
            })
        };
        Self((choice.flags)().into_iter().filter_map(value).collect())
    }

    /// The values by field, as in `config.json`.
    pub fn to_json(&self) -> Map<String, Value> {
        let entry = |value: &FlagValue| {
            let mut words = value.words.iter().map(|word| typed_value(word));
            let json = if value.is_list {
                Value::Array(words.collect())
            } else {
                words.next().unwrap_or(Value::Null)
            };
            (value.field.clone(), json)
        };
        self.0.iter().map(entry).collect()
    }

    /// The flags with their values, as one would type them.
    pub fn typed(&self) -> Vec<(String, String)> {
        self.0.iter().map(|value| (value.flag.clone(), value.words.join(" "))).collect()
    }
}

/// The text as a JSON number or Boolean if it is one.
pub fn typed_value(text: &str) -> Value {
    let text_of = |value: &Value| serde_json::to_string(value).unwrap_or_default();
    match serde_json::from_str(text) {
        // A number that JSON would write differently stays text.
        Ok(value @ (Value::Bool(_) | Value::Number(_))) if text_of(&value) == text => value,
        _ => Value::String(text.to_owned()),
    }
}

/// The flags that a struct derives.
pub fn flags_of<T: Args>() -> Vec<Arg> {
    T::augment_args(Command::new("flags")).get_arguments().cloned().collect()
}

/// Reads a struct of flags from a run's settings.
pub fn read<T: FromArgMatches>(settings: &ArgMatches) -> Result<T> {
    T::from_arg_matches(settings).map_err(|error| Failure::Usage(error.to_string()))
}

/// Numbers as they are typed after a flag.
pub fn spaced(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

/// A parser for the width of a layer, at most 2^20, so that the product of two widths does not overflow.
pub fn width() -> impl Fn(&str) -> std::result::Result<usize, String> + Clone {
    numbers::within(1, 1 << 20)
}
