//! Reads values that other modules offer by name from flags, and lists them in the help.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A value with its description and its other names.
pub type Named<T> = (T, &'static str, &'static [&'static str]);

/// A parser for one of these values, by the name that `name` gives it or by another of its names.
pub fn parser<T: Copy + Send + Sync + 'static>(
    all: &'static [Named<T>],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let possible = |&(value, help, aliases): &Named<T>| {
        PossibleValue::new(name(value)).help(help).aliases(aliases)
    };
    PossibleValuesParser::new(all.iter().map(possible)).try_map(move |text| {
        let is_it = |(value, _, aliases): &&Named<T>| {
            name(*value) == text || aliases.contains(&text.as_str())
        };
        all.iter().find(is_it).map(|(value, ..)| *value).ok_or("no such value")
    })
}
