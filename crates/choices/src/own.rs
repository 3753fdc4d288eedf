//! A program's own choices: a type whose fields are the flags, and the choice that is made from it.

use std::ffi::OsString;
use std::fmt::Debug;
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Args, Command};
use paceline_failure::{Failure, Result};

use super::data::{DataSettings, OfData};
use super::models::{ModelSettings, OfModel};
use super::registry::{Choice, flags_of, read, takes_list};
use super::strategies::{OfStrategy, StrategySettings, Synchronizes};

/// A choice that a program adds. The fields of the type are its flags, with their help, accepted values and defaults, so a
/// value of the type is the choice with all its settings.
///
/// The type also implements [`ModelSettings`], [`DataSettings`] or [`OwnStrategy`], and is added by a method of
/// `paceline::Program`.
///
/// ```
/// use std::sync::Arc;
///
/// use clap::Args;
/// use paceline_choices::data::DataSettings;
/// use paceline_choices::own::Own;
/// use paceline_data::{Dataset, Field, Sample, Split};
/// use paceline_failure::Result;
///
/// /// Ones and zeros in turns. `--data turns --numbers 10` has 10 of them.
/// #[derive(Debug, Args)]
/// struct Turns {
///     /// turns: how many there are
///     #[arg(long, default_value_t = 100)]
///     numbers: usize,
/// }
///
/// impl Own for Turns {
///     const NAME: &str = "turns";
///     const ABOUT: &str = "Ones and zeros in turns";
/// }
///
/// impl DataSettings for Turns {
///     fn open(&self, _seed: u64, _: Split) -> Result<Arc<dyn Dataset>> {
///         Ok(Arc::new(Numbers(self.numbers)))
///     }
/// }
///
/// struct Numbers(usize);
///
/// impl Dataset for Numbers {
///     fn len(&self) -> usize {
///         self.0
///     }
///
///     fn fields(&self) -> Vec<Field> {
///         vec![Field::f32("inputs", [1]), Field::class(2)]
///     }
///
///     fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
///         sample.f32("inputs")[0] = (index % 2) as f32;
///         sample.set_class((index % 2) as i64);
///     }
/// }
///
/// assert_eq!(Turns { numbers: 10 }.open(42, Split::Train)?.len(), 10);
/// # Ok::<(), paceline_failure::Failure>(())
/// ```
pub trait Own: Args + Debug + Send + Sync + 'static {
    /// Its name on the command line and in files.
    const NAME: &'static str;

    /// One line of help.
    const ABOUT: &'static str;

    /// A word with which its flags begin, against names that are taken: with `net`, the field `hidden` is the flag
    /// `--net-hidden`. Flags that name each other, as with `conflicts_with`, cannot have one.
    const PREFIX: &'static str = "";
}

/// A strategy that a program adds.
pub trait OwnStrategy: Own + StrategySettings {
    /// How often the ranks' models are made equal, by default after every step.
    const SYNCHRONIZES: Synchronizes = Synchronizes::EveryStep;
}

/// The model that a type is.
pub fn model<T: Own + ModelSettings>() -> Choice<OfModel> {
    choice::<T, _>(OfModel {
        width_flags: &[],
        resolve: |settings| Ok(Arc::new(read_own::<T>(settings)?)),
    })
}

/// The data set that a type is.
pub fn data<T: Own + DataSettings>() -> Choice<OfData> {
    choice::<T, _>(OfData::read_by(|settings, _| Ok(Arc::new(read_own::<T>(settings)?))))
}

/// The strategy that a type is.
pub fn strategy<T: OwnStrategy>() -> Choice<OfStrategy> {
    let of = OfStrategy::read_by(|settings, _| Ok(Arc::new(read_own::<T>(settings)?)));
    choice::<T, _>(OfStrategy { synchronizes: T::SYNCHRONIZES, ..of })
}

fn choice<T: Own, K>(of: K) -> Choice<K> {
    let flags = || flags_of::<T>().into_iter().map(|flag| prefixed(T::PREFIX, flag)).collect();
    Choice { name: T::NAME, aliases: &[], about: T::ABOUT, flags, of }
}

/// A flag with the prefix in all its names.
fn prefixed(prefix: &str, flag: Arg) -> Arg {
    let (false, Some(long)) = (prefix.is_empty(), flag.get_long().map(str::to_owned)) else {
        return flag;
    };
    let aliases = flag.get_all_aliases().unwrap_or_default();
    let aliases: Vec<String> = aliases.iter().map(|alias| format!("{prefix}-{alias}")).collect();
    let id = id_of(prefix, &flag);
    flag.id(id).long(format!("{prefix}-{long}")).alias(None).aliases(aliases)
}

/// The name of a flag among the settings of a run.
fn id_of(prefix: &str, flag: &Arg) -> String {
    format!("{}_{}", prefix.replace('-', "_"), flag.get_id())
}

/// Reads the type from a run's settings, where its flags have the prefix.
fn read_own<T: Own>(settings: &ArgMatches) -> Result<T> {
    if T::PREFIX.is_empty() {
        return read(settings);
    }
    // The type knows its flags without the prefix, so values are parsed again.
    let mut words = Vec::new();
    for flag in flags_of::<T>() {
        let Some(long) = flag.get_long() else { continue };
        for value in settings.get_raw(&id_of(T::PREFIX, &flag)).into_iter().flatten() {
            let mut word = OsString::from(format!("--{long}="));
            word.push(value);
            words.push(word);
        }
    }
    let command = T::augment_args(Command::new(T::NAME).no_binary_name(true)).mut_args(one_by_one);
    let typed = command.try_get_matches_from(words).map_err(|e| Failure::Usage(e.to_string()))?;
    read(&typed)
}

/// The flag with values stated one by one, also of a switch.
fn one_by_one(flag: Arg) -> Arg {
    if matches!(flag.get_action(), ArgAction::SetTrue) {
        return flag.action(ArgAction::Set).value_parser(clap::value_parser!(bool));
    }
    if takes_list(&flag) { flag.action(ArgAction::Append).num_args(1) } else { flag }
}
