//! The cases of a sweep: the combinations of the varied flags, and the order of all runs.

use paceline_failure::{Failure, Result, usage};
use paceline_files::printable;

use crate::scene::Scene;
use crate::spec::{self, Spec};

/// The most cases. More are taken for a mistake.
const MAX_CASES: usize = 10_000;

/// A flag that is varied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vary {
    /// The flag of the study that names it, such as `--vary`.
    pub given_by: &'static str,
    /// The name of the flag.
    pub key: String,
    /// Its values, as text.
    pub alternatives: Vec<String>,
}

impl Vary {
    /// Reads `KEY=A,B`, the value of `flag`. Semicolons separate alternatives with commas.
    pub fn parse(flag: &'static str, text: &str) -> Result<Self> {
        let refused = |why: &str| Err(Failure::Usage(format!("{flag} {}: {why}", printable(text))));
        let Some((key, values)) = text.split_once('=') else {
            return refused("pass the name of a flag and its values, as nproc=1,2");
        };
        let key = key.trim().trim_start_matches('-');
        spec::check_key(flag, key)?;
        let separator = if values.contains(';') { ';' } else { ',' };
        // A single alternative with commas ends with a semicolon.
        let values = values.strip_suffix(';').unwrap_or(values);
        let words = |value: &str| value.split_whitespace().collect::<Vec<_>>().join(" ");
        let alternatives: Vec<String> = values.split(separator).map(words).collect();
        if alternatives.iter().any(String::is_empty) {
            return refused("a value is missing");
        }
        let is_twice = |(at, value): (usize, &String)| alternatives[..at].contains(value);
        if alternatives.iter().enumerate().any(is_twice) {
            return refused("a value is there twice");
        }
        Ok(Self { given_by: flag, key: key.to_owned(), alternatives })
    }

    /// The specification with the flag set to one of its alternatives. Errors name both flags.
    pub fn set(&self, spec: &Spec, alternative: &str) -> Result<Spec> {
        spec::with(spec, &self.key, alternative)
            .map_err(|failure| Failure::Usage(format!("{} {failure}", self.given_by)))
    }

    /// The text from which [`Vary::parse`] reads the same value.
    pub fn text(&self) -> String {
        format!("{}={};", self.key, self.alternatives.join(";"))
    }
}

/// One of the cases that are compared.
#[derive(Clone, Debug, Default)]
pub struct Case {
    /// Its name, as people read it.
    pub name: String,
    /// The specification of its runs.
    pub spec: Spec,
    /// Its warnings, such as about flags without effect.
    pub warnings: Vec<String>,
}

impl Case {
    /// A case whose specification is checked.
    pub fn new(name: impl Into<String>, spec: Spec) -> Result<Self> {
        let is_program = spec.has(spec::PROGRAM);
        let warnings = if is_program { Vec::new() } else { spec::resolve(&spec)?.warnings };
        Ok(Self { name: name.into(), spec, warnings })
    }
}

/// Fails if a flag is varied twice, or has a value of its own in `base`.
fn check(base: &Spec, vary: &[Vary]) -> Result<()> {
    for (at, Vary { given_by, key, .. }) in vary.iter().enumerate() {
        if vary[..at].iter().any(|other| other.key == *key) {
            return Err(Failure::Usage(format!(
                "{given_by} {key}: it is there twice; pass all its values at once, as {key}=A,B"
            )));
        }
        if base.has(key) {
            return Err(Failure::Usage(format!("--{key}: {given_by} {key} sets it; leave it out")));
        }
    }
    Ok(())
}

/// The index of each flag's value in each case: all combinations, the last flag changing fastest; or only those with at most
/// one flag not at its first value. Fails for too many cases.
fn choices(vary: &[Vary], one_at_a_time: bool) -> Result<Vec<Vec<usize>>> {
    let mut lens = vary.iter().map(|of| of.alternatives.len());
    let count = if one_at_a_time {
        Some(1 + lens.map(|len| len - 1).sum::<usize>())
    } else {
        lens.try_fold(1, usize::checked_mul)
    };
    if count.is_none_or(|count| count > MAX_CASES) {
        return usage(format!("these are more than {MAX_CASES} cases; pass fewer values"));
    }
    let mut choices = vec![vec![0; vary.len()]];
    for (at, of) in vary.iter().enumerate() {
        let bases = if one_at_a_time { 1 } else { choices.len() };
        let others = |base: &Vec<usize>| {
            let base = base.clone();
            (1..of.alternatives.len()).map(move |value| {
                let mut choice = base.clone();
                choice[at] = value;
                choice
            })
        };
        let more: Vec<Vec<usize>> = choices[..bases].iter().flat_map(others).collect();
        choices.extend(more);
    }
    choices.sort_unstable();
    Ok(choices)
}

/// The cases as a scene: all combinations, or one flag at a time. Each is resolved.
pub fn combinations(base: &Spec, vary: &[Vary], one_at_a_time: bool) -> Result<Scene> {
    check(base, vary)?;
    let mut scene = Scene::new("");
    for chosen in choices(vary, one_at_a_time)? {
        let values = vary.iter().zip(&chosen);
        let values: Vec<String> = values.map(|(of, at)| of.alternatives[*at].clone()).collect();
        let mut spec = base.clone();
        for (of, value) in vary.iter().zip(&values) {
            spec = of.set(&spec, value)?;
        }
        let named = vary.iter().zip(&values).map(|(of, value)| format!("{}={value}", of.key));
        let name = named.collect::<Vec<_>>().join(", ");
        spec::resolve(&spec)
            .map_err(|failure| Failure::Usage(format!("case {name}: {failure}")))?;
        scene = scene.with(name, spec);
        scene.variants.last_mut().into_iter().for_each(|last| last.values.clone_from(&values));
    }
    Ok(scene)
}

/// A run: its place in the order of all runs, its round and its case.
pub type Planned = (usize, (usize, usize));

/// All runs in their order. Each round runs every case once, every second round in reverse order, so that
/// slow changes of the machine affect all alike.
pub fn order(num_cases: usize, rounds: usize) -> Vec<Planned> {
    let round = |round: usize| {
        let forth = (0..num_cases)
            .map(move |at| if round.is_multiple_of(2) { at } else { num_cases - 1 - at });
        forth.map(move |case| (round, case))
    };
    (0..rounds).flat_map(round).enumerate().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vary(text: &str) -> Vary {
        Vary::parse("--vary", text).unwrap()
    }

    fn refused(text: &str) -> String {
        Vary::parse("--vary", text).unwrap_err().to_string()
    }

    #[test]
    fn alternatives_are_separated_by_commas_or_semicolons() {
        assert_eq!(vary("nproc=1,2").alternatives, ["1", "2"]);
        assert_eq!(vary("--nproc=1, 2").key, "nproc");
        assert_eq!(vary("channels=16  32,32 64").alternatives, ["16 32", "32 64"]);
        assert_eq!(vary("link=10gbit,50us;1gbit,1ms").alternatives, ["10gbit,50us", "1gbit,1ms"]);
        assert_eq!(vary("link=10gbit,50us;").alternatives, ["10gbit,50us"]);
    }

    #[test]
    fn what_cannot_be_varied_is_refused_in_words() {
        assert!(refused("nproc").contains("as nproc=1,2"));
        assert!(refused("nproc=1,,2").contains("a value is missing"));
        assert!(refused("nproc=").contains("a value is missing"));
        assert!(refused("nproc=1,2,1").contains("twice"));
        assert!(refused("nprocs=1").contains("the nearest one is nproc"));
        assert!(refused("bucket_cap_mb=1").contains("the nearest one is bucket-cap-mb"));
        assert!(refused("save=a").contains("the same files"));
        assert!(refused("quiet=true").contains("the output of its runs"));
        assert!(refused("ddp-choice=all").contains("vary strategy"));
    }

    #[test]
    fn every_alternative_meets_every_other() {
        let many = ["seed", "steps", "hidden", "nproc", "threads"]
            .map(|key| vary(&format!("{key}=1,2,3,4,5,6,7,8")));
        let vary = [vary("strategy=ddp,flat_ddp"), vary("hidden=8,16 ,32")];
        let scene = combinations(&Spec::default(), &vary, false).unwrap();
        let names: Vec<&str> = scene.variants.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names[..2], ["strategy=ddp, hidden=8", "strategy=ddp, hidden=16"]);
        assert_eq!(names.len(), 6);
        assert_eq!(scene.variants[5].values, ["flat_ddp", "32"]);
        let scene = combinations(&Spec::default(), &vary, true).unwrap();
        let values: Vec<String> = scene.variants.iter().map(|case| case.values.join(" ")).collect();
        assert_eq!(values, ["ddp 8", "ddp 16", "ddp 32", "flat_ddp 8"]);
        assert_eq!(choices(&many, true).unwrap().len(), 36);
        assert!(choices(&many, false).is_err());
    }

    #[test]
    fn settings_become_flags() {
        let base = Spec::default();
        let words = |key: &str, value: &str| spec::shown(&spec::with(&base, key, value).unwrap());
        assert_eq!(words("channels", "16 32"), "paceline train --channels 16 32");
        assert_eq!(words("batch-norm", "false"), "paceline train --batch-norm=false");
        assert_eq!(words("batch-norm", "true"), "paceline train --batch-norm=true");
        assert_eq!(words("link", spec::LEFT_OUT), "paceline train");
        let bad = spec::with(&base, "batch-norm", "yes").unwrap_err().to_string();
        assert!(bad.contains("--batch-norm") && bad.contains("true, false"), "{bad}");
        let bad = spec::with(&base, "strategy", "magic").unwrap_err().to_string();
        assert!(bad.contains("'magic'"), "{bad}");
    }

    #[test]
    fn an_unsound_case_is_named() {
        let base = Spec::default().with("nproc", 2);
        let alone = [vary("strategy=ddp,single")];
        let error = combinations(&base, &alone, false).unwrap_err().to_string();
        assert!(error.starts_with("case strategy=single: "), "{error}");
        let error = combinations(&base, &[vary("nproc=1,2")], false).unwrap_err().to_string();
        assert!(error.contains("leave it out"), "{error}");
        let twice = [vary("nproc=1,2"), vary("nproc=1")];
        assert!(
            combinations(&Spec::default(), &twice, false)
                .unwrap_err()
                .to_string()
                .contains("there twice")
        );
    }

    #[test]
    fn rounds_go_there_and_back_again() {
        let all = order(3, 3);
        let cases: Vec<usize> = all.iter().map(|(_, (_, case))| *case).collect();
        assert_eq!(cases, [0, 1, 2, 2, 1, 0, 0, 1, 2]);
        let rounds: Vec<usize> = all.iter().map(|(_, (round, _))| *round).collect();
        assert_eq!(rounds, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    }
}
